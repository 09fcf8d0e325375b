"""The state that the stages of a decision work on."""
