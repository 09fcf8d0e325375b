"""``cadenza simulate``."""
