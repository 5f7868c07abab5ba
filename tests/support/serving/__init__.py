"""Servers and their clients."""
