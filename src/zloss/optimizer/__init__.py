"""What reaches the optimizer step: gradients before and after clipping, event rates over steps, Adam's state."""
