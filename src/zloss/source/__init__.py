"""What each token (or routing decision) injects at the logits: statistics, objectives, injection, reductions."""
