"""Whole experiments made of audits, runs and decisions: recommend, center, drift."""
