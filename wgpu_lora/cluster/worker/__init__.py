"""Jobs in processes of their own: a job as JSON in, events as JSON lines out."""
