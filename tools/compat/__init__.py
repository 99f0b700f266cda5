"""The tests against several versions of Python and of the dependencies: `python -m tools.compat` (`make compat`)."""
