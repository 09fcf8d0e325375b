"""Preemption: in each turn the best-ranked jobs that fit have the GPUs, by turns, moves and seats given up."""
