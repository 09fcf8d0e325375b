"""Leases, in memory and on disk."""
