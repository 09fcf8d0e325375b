"""The Slurm half of Cadenza: plugins, gateway, policy service and commands."""
