"""Training steps that several devices share."""
