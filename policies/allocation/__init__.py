"""Who gets what: one function a file, from a case to a plan."""
