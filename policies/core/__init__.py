"""What a policy sees and says: snapshot, actions, decision, profile."""
