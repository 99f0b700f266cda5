"""The figures: what they show, and how they are drawn."""
