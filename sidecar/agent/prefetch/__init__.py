"""Page-cache prefetch of the files of a job that moves."""
