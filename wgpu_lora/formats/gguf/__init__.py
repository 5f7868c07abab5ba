"""GGUF, llama.cpp's format: models and adapters written for it, and its models read as a base."""
