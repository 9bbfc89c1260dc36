"""What schedulers and the server say of themselves: status, loads, metrics, traces, recordings."""
