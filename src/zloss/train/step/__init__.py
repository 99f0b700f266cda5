"""What one step computes, and what is shown of it."""
