"""The decisions, sans I/O: no clock, no unseeded randomness, no torch, no sglang.

Time is an argument, randomness a seed, every decision an immutable value; the
engine (``srt``) and the simulator drive this same code.
"""
