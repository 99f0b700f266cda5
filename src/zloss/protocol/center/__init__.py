"""`zloss center`: the intervention "deploy the row-centered head" as a checkpoint that anyone can load."""
