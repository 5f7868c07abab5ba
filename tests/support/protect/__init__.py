"""Protected runs and their brokers."""
