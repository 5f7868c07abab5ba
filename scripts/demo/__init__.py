"""How the embedded demo's model and data are made."""
