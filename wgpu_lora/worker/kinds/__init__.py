"""What workers do, a kind of job each."""
