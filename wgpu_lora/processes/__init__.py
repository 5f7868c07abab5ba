"""Processes: children with limits, signals, and what confines them."""
