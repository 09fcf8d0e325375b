"""Simulations of a cluster's jobs, for the commands simulate, whatif and watch: requests, runs and what they say."""
