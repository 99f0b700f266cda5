"""Recipes of the training tables."""
