"""The service's record as people read it, in a terminal and on web pages."""
