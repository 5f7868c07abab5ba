"""Keys, and files sealed in the age format."""
