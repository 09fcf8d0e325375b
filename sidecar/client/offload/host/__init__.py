"""The host's memory: how much a move may take, and on which NUMA node."""
