"""``cadenza sweep``: many configurations as one multi-job."""
