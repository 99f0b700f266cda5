"""What every recipe is made of: tables, claims, the run of a recipe, and what runs share."""
