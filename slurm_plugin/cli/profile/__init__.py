"""``cadenza profile``: sensitivity profiles of jobs."""
