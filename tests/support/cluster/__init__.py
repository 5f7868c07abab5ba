"""Hosts, real and fake."""
