"""The link to the agents: hub, registry, keys."""
