"""What runs on the machines of a cluster: the actors of a host and of a device, and copies of checkpoints."""
