"""Jobs of Ray Data as processes, and what is left of them when they are killed."""
