"""Targets and mutations of files, for `make fuzz` and for a test that runs a few of the same inputs."""
