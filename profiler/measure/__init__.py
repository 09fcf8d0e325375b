"""Measurement: a command run at points of CPUs and memory."""
