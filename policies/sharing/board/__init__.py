"""The board: hosts with their lanes and jobs, nodes as Slurm has them, and what jobs need there."""
