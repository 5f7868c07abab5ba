"""NF4, as in QLoRA."""
