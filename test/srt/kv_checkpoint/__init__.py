"""Checkpoints of offline KV, on the real scheduler and on their own."""
