"""Workloads: recorded and synthetic arrivals, their lengths, and prompts to match.

``trace`` reads requests and ``synthetic`` makes them, ``shape`` fits them to a machine; then
``synthetic`` makes their prompts.
"""
