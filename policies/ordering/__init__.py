"""Orderings: one function a file, from a queue to a ranking."""
