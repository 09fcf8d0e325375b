"""Moves of running jobs between GPUs and hosts."""
