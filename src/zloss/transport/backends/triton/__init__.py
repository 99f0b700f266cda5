"""Triton backend: three row kernels, the custom ops around them, and the losses built from those ops.

Nothing here is imported before a Triton loss is asked for; `availability` alone does not import triton.
"""
