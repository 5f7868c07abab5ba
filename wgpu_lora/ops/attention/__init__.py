"""Attention and what takes its place."""
