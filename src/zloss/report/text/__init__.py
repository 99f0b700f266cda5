"""Numbers, symbols and sentences as people read them."""
