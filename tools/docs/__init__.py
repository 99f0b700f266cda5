"""The generated pages of the documentation: `python -m tools.docs` writes them, tests/docs/test_generated.py compares them."""
