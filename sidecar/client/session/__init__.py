"""The session of an attached process: step page, link to the agent, orders."""
