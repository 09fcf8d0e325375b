"""Policies as published code has them, where that departs from its paper."""
