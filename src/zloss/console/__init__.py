"""What a long job shows while it runs, and how it is interrupted."""
