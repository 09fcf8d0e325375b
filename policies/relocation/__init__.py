"""A move of a job over several rounds: checkpoint, requeue, place, restore."""
