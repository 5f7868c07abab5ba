"""Distillation: what a teacher says about each trained token, live or from a cache on disk."""
