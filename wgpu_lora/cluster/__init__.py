"""Training on several machines with Ray: devices as resources, placement of adapters, and the state of runs."""
