"""Policies, and the appraisal of evidence by them."""
