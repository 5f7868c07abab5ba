"""The embedded demo: a small Qwen3-architecture model, its data, and the unit checks that score it."""
