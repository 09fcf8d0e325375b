"""Where pending jobs start, and how a host is divided."""
