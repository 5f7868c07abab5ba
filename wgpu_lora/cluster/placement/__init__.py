"""Which device trains what."""
