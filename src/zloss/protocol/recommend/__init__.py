"""`zloss recommend`: audit, matched runs, selection, confirmation, implementation and router on one model."""
