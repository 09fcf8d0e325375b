"""Allocations: one function a file, from an allocation problem to a plan."""
