"""Text as a stream of tokens: corpora, and blocks whose every prediction is counted once."""
