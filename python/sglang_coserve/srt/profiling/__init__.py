"""Measures batches on a real scheduler, and finds the latency model of a server."""
