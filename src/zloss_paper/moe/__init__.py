"""Recipes of the mixture-of-experts runs and of the router conventions."""
