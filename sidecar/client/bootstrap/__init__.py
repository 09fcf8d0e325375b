"""How a process joins: attach, `cadenza run`, automatic attach."""
