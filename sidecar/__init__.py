"""The node half of Cadenza: the client inside a job, and the agent."""
