"""What the Batch API costs and withstands, measured on a real server; see docs/benchmarks.md."""
