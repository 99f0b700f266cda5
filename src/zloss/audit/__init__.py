"""Audits: of a checkpoint on a text, of a loss function, of a router, of an implementation of Z-loss."""
