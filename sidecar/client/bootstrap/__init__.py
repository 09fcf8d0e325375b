"""Start of a process's session: attach, `cadenza run`, automatic attach."""
