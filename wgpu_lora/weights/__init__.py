"""Base formats: how frozen matrices are kept on the device, a file a format."""
