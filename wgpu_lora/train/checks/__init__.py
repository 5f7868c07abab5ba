"""Answers checked by running them: unit checks in confined processes, and pass@k."""
