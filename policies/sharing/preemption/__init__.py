"""Preemption in Slurm's own order: running jobs of a worse level make way for the first jobs of Slurm's queue."""
