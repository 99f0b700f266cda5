"""What an implementation of CE+Z really injects: storage, kernels, updates and fp16 headroom, against fp64."""
