"""Runs of other people's loops, recorded into the folder that `zloss compare` reads."""
