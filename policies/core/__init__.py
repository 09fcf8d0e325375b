"""Values that a policy sees and returns: snapshot, actions, decision, profile."""
