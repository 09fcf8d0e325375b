"""Samples of NVML, processes and pages, and their records."""
