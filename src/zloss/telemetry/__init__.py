"""Numbers of a run while it runs: windows over its last steps, alerts on changes. Used by loops, ours and others'."""
