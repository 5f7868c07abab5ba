"""Files: written whole or not at all, locked, checked, and those that come with the package."""
