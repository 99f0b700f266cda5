"""Training runs of a mixture of experts."""
