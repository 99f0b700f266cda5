"""Audits: a model or a loss, and a corpus, to findings."""
