"""Recorded programs and buffers of a run on a device."""
