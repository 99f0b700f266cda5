"""Text as a stream of tokens: corpora, and blocks in which every prediction is counted once."""
