"""The only code that talks to Slurm: a worker around pyslurm, its supervisor, recorded answers."""
