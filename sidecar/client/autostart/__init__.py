"""A directory for PYTHONPATH; nothing imports it by this name."""
