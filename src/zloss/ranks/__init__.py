"""Which rank holds which rows of the vocabulary and which tokens."""
