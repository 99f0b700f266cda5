"""What audits and training runs both measure: one pass over tokens, and gradients at the head."""
