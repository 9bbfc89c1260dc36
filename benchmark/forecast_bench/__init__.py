"""Batches on a simulated engine: how good their forecasts are, and their last lines."""
