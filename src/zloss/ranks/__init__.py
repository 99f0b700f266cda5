"""Process groups: which rank holds which rows, and who counts which token."""
