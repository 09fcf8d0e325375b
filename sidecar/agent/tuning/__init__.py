"""Changes of a running job's CPUs and memory in place: the plan, and its enforcement."""
