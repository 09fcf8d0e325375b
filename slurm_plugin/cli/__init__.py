"""The ``cadenza`` command."""
