"""Jobs that run on one GPU at once."""
