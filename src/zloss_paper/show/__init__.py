"""A reproduction on the terminal and as a page."""
