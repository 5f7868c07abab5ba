"""Base formats: the storage of frozen matrices on the device, one file per format."""
