"""What offline work costs online requests, against a baseline without it, and how much it may."""
