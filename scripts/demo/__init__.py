"""The parts of `scripts/make_demo.py`: how the embedded demo's model and data are made."""
