"""Jobs that grow and shrink, and hosts whose CPUs are lent."""
