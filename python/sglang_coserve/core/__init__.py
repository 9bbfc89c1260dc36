"""Scheduling decisions, sans I/O: no clock, no unseeded randomness, no torch, no sglang.

Needs numpy and sortedcontainers, and ``errors`` and ``metrics`` of this package; scipy for fits.
Time is an argument, randomness comes from a seed, and every decision is an immutable value.
The engine (``srt``) and the simulator drive the same code.
"""
