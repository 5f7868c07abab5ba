"""GGUF, llama.cpp's format: reading models, and writing models and adapters."""
