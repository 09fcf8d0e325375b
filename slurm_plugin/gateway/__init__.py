"""The only code that talks to Slurm: sources over pyslurm and over Slurm's JSON, recorded answers."""
