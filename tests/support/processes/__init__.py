"""Processes that are confined, killed or share a device."""
