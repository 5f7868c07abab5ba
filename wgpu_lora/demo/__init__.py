"""The bundled demo: a small model of the Qwen3 architecture, its data, and the unit checks that score its answers."""
