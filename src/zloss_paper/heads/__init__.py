"""Recipes that audit the output heads of pretrained models."""
