"""Measures step times on this machine: runs a grid of batches, fits models, reports errors.

The executor that runs a batch is a protocol; the real one is in ``srt``.
"""
