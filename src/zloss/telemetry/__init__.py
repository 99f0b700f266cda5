"""Numbers of a running training loop: windows over its last steps, alerts on changes, names for trackers."""
