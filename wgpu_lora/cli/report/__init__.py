"""Reports of finished runs: tables and charts of their records on one page."""
