"""What `protect check` verifies, part by part."""
