"""Inference: generation, chat, evaluation and serving."""
