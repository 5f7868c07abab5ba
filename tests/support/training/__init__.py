"""Training runs and their reports."""
