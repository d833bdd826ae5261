"""A server beside `generate` and beside other servers and clients."""
