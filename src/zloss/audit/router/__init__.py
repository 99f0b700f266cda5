"""The audit of routers: what they do on a corpus, and which scale a router loss really applies."""
