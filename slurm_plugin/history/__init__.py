"""Slurm's past and its queue: records of jobs, nodes, the site's rules, and the jobs as they ran."""
