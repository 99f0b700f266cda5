"""Recipes: one module per table or figure of the paper, its settings and its numbers."""
