"""Placement of pending jobs, and division of a host."""
