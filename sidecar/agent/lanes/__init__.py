"""Further lanes on demand: each has a slurmd of its own, which the agent starts, watches and ends."""
