"""What ``benchmark/chaos.py`` does to a server, and what it finds out about it."""
