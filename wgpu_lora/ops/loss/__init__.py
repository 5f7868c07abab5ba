"""Losses over a vocabulary, and sampling from it."""
