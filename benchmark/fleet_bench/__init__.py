"""What ``benchmark/fleet_chaos.py`` does to a gateway and its engines."""
