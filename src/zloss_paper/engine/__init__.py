"""What every recipe is made of: tables, claims, the run of a recipe, audits and training runs that recipes share."""
