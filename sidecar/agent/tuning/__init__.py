"""Changing a running job's CPUs and memory in place: what each job gets, and how it is put into force."""
