"""Leaves that connect zloss to other libraries; nothing of ours imports them."""
