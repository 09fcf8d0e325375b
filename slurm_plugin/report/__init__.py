"""The HTML page of ``cadenza report``: saved simulation results in, one self-contained page out; no I/O, no clock."""
