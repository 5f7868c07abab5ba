"""Quantised matrices as GGUF files hold them."""
