"""The command line: dispatch, options, and the subcommands by subject; no mathematics."""
