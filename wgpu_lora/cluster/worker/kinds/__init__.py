"""The kinds of jobs, a file each."""
