"""Every file this package writes, as a typed, versioned record with its reader and writer. No torch here."""
