"""From results and decisions to pages, figures, tables, the terminal and files. No torch here."""
