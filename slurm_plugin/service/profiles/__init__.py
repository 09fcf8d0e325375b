"""Profiles from files, and their corrections learned from running jobs."""
