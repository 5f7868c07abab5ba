"""Ray actors on the hosts."""
