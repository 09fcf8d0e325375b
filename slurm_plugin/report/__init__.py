"""The HTML page of ``cadenza report``, made from saved simulation results; no I/O, no clock."""
