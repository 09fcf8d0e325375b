"""A gateway and a clock over a trace: the same policies and the same round as on the live cluster, in seconds."""
