"""Matched training runs."""
