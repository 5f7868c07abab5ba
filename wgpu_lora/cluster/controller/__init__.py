"""The actor that all runs belong to, and its state."""
