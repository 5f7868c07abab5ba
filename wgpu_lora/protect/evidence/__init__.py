"""Signed statements, and the log that chains them."""
