"""Moved KV, on the real scheduler and on its own."""
