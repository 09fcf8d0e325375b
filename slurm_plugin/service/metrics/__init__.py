"""The service's figures for Prometheus: counted as rounds end, and read from the last round."""
