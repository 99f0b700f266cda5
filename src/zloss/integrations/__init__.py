"""Modules that connect zloss to other libraries; nothing else in zloss imports them."""
