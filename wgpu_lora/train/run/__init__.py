"""What a run keeps on disk and in its records."""
