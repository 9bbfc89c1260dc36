"""Checkpoints of offline KV in host memory: device KV is reclaimed at once, and not recomputed.

``srt.optional_parts`` alone imports this package: ``setup`` sets it up in an engine, and ``store``
is what a scheduler calls. ``cache`` is SGLang's unified radix cache with checkpoints. Its parts are
``strategies`` (when to copy), ``request_checkpoint`` (host pages of requests),
``checkpoint_copies`` (what is copied, and in flight), ``reclaim`` (freeing device and host memory,
loading back to the device). ``cpu`` replaces pinned memory and CUDA streams on a CPU.
Importing this package imports no other module.
"""
