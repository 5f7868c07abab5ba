"""The driver side of a cluster: connecting to it, checking a request before anything runs, following and fetching."""
