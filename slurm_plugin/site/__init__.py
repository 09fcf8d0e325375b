"""A site as Cadenza finds it: facts and checks of Slurm, hosts and GPUs, and the lines that a site adds."""
