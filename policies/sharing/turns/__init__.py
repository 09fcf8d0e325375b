"""Time slices: whose turn it is, and what Slurm is told."""
