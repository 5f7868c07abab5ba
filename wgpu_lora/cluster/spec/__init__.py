"""What a person asks of a cluster: cluster.toml, the tasks of a run, and sweeps."""
