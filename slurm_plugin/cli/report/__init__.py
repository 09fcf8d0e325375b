"""``cadenza report``: HTML pages from saved results and from the store."""
