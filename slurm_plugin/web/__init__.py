"""``cadenza web``: read-only pages about the cluster, in a process of their own."""
