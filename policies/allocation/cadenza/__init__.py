"""Cadenza's own allocation: the whole profile matrix, each node divided exactly."""
