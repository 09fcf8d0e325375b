"""Sensitivity of a job to CPUs and memory: measure, model, write, explain."""
