"""Following runs: the run log of a user, trackers, and the status of the hardware."""
