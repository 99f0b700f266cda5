"""How a model is opened and read: checkpoints, GGUF files, output heads, routers."""
