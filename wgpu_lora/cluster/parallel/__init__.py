"""Data-parallel adapters: a unit's process, on the leading device, asks processes on other devices for parts of its
steps (train/data_parallel/leader.py). Messages go from socket to socket through Ray's actors, as bytes."""
