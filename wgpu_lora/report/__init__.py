"""Reports of finished runs: what their directories hold, drawn and put on one page."""
