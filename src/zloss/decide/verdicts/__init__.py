"""The verdict on a trained method: three parts, each with its numbers and its state."""
