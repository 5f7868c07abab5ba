"""A cluster in virtual time: the placement that clusters use, on devices that have measured speeds and fail."""
