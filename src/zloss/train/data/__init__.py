"""Which tokens a run sees, as a function of seed, step and micro-batch."""
