"""Tables of results, as data and as Markdown."""
