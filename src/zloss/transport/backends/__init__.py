"""How a head loss is computed: the dense truth, chunks in plain PyTorch, Triton kernels."""
