"""Stopping rules of a sweep: pure functions of the configurations' learning curves."""
