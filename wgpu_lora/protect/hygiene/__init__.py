"""What keeps secrets off the disk, and overwrites them at the end."""
