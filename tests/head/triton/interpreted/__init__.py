"""Checks that run on Triton's interpreter: `test_interpreted.py` starts them in a process with TRITON_INTERPRET=1."""
