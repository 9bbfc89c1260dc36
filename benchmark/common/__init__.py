"""What several benchmarks share: processes, servers, loads, results."""
