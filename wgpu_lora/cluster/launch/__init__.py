"""Starting Ray on hosts, and ending it."""
