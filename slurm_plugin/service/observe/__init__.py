"""The snapshot of a round: Slurm, leases, profiles, progress."""
