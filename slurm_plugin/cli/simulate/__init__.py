"""``cadenza simulate`` and ``cadenza policies``."""
