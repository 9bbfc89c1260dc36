"""Scheduling decisions, sans I/O: no clock, no unseeded randomness, no torch, no sglang.

Time is an argument, randomness comes from a seed, and every decision is an immutable value.
The engine (``srt``) and the simulator drive the same code.
"""
