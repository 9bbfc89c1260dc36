"""What ``chaos.py`` and ``fleet_chaos.py`` do to servers, and what they find out about them."""
