"""Which configurations of a sweep go on, which are stopped, which are favoured: pure functions of their curves."""
