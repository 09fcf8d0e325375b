"""``cadenza whatif``: a cluster's own history under Slurm alone and under Cadenza."""
