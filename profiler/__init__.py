"""Offline sensitivity profiles of training jobs."""
