"""Recipes that audit implementations of CE + Z: storage, kernels, updates, overflow."""
