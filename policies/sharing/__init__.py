"""How jobs share GPUs over time (Gandiva, OSDI'18)."""
