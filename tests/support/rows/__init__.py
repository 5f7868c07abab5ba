"""Rows and tokenizers."""
