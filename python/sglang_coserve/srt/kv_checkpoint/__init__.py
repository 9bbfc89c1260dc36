"""Checkpoints of offline KV in host memory: device KV is reclaimed at once, and not recomputed.

A scheduler calls ``hooks``, a launcher uses ``settings``. ``cache`` is
SGLang's unified radix cache with checkpoints. Its parts are ``request_checkpoint`` (host pages of
requests), ``checkpoint_copies`` (what is copied, and in flight), ``reclaim``
(freeing device and host memory, loading back to the device). ``cpu`` replaces pinned memory and
CUDA streams on a CPU. ``kv_files`` and ``kv_directory`` move KV between engines.
Importing this package imports no other module.
"""
