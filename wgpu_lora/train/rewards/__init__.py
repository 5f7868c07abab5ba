"""Rewards of completions: functions from Python files and built-in ones, in a child process."""
