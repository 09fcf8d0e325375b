"""Models of Slurm's own scheduling, which policies and the simulator share."""
