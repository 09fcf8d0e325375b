"""Sharing of GPUs over time (Gandiva, OSDI'18)."""
