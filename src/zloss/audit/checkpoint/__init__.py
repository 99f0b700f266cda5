"""The audit of a checkpoint on a text."""
