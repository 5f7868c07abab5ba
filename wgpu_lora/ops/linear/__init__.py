"""Linear layers with adapters."""
