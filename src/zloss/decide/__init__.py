"""From results to decisions: stages, thresholds, budgets. No torch here."""
