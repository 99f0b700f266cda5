"""A small compiled helper for the CPU: the row pass of the chunked backend, fused. Optional; plain PyTorch otherwise."""
