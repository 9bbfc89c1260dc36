"""Parts of the KV benchmarks."""
