"""Pages and a browser."""
