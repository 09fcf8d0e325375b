"""The jobs of this host: registration, stop step, iteration time."""
