"""The report: typed, versioned schema; decision map; JSON, terminal, HTML page and figures."""
