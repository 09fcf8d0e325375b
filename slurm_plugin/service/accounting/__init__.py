"""Usage and the effects of decisions (pure)."""
