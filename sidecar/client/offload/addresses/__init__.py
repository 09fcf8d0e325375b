"""Moves at which device addresses stay: over cudaMalloc by virtual memory, where its library was preloaded."""
