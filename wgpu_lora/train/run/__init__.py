"""The files and records of a run."""
