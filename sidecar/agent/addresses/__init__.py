"""The library that a job preloads so that device addresses stay at a yield, in C."""
