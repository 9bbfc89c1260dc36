"""Real routers in front of real engines, one of them full of offline work."""
