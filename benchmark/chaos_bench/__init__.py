"""What ``chaos.py`` does to servers, and what it finds out about them."""
