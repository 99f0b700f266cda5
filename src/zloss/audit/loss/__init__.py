"""The black-box audit of a loss: what it injects, read from its own gradients."""
