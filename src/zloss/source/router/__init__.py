"""Router Z-loss: what a routing decision injects, and what a coefficient means under each convention."""
