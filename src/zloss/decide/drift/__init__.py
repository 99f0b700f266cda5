"""Drift over the checkpoints of one run: which numbers moved while cross-entropy stood still, and where that began."""
