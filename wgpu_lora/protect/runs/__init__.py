"""Protected runs: their jobs, sessions and files."""
