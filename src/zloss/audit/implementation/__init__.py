"""What an implementation of CE + Z actually injects: storage, kernels, updates and fp16 headroom, against fp64."""
