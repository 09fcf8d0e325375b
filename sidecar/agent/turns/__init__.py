"""Turns: the stop of one job and the start of the next."""
