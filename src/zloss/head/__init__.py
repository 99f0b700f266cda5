"""Cross-entropy plus Z-loss from hidden states and the output head. Start with `loss.py`, then `chunked.py`."""
