"""The objectives of the paper, one file each."""
