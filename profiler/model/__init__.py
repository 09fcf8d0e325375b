"""Models fitted to measurements (pure)."""
