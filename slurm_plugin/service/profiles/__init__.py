"""Profiles on disk and what running jobs teach about them."""
