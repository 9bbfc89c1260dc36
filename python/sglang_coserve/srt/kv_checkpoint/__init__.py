"""Checkpoints of offline KV in host memory: device KV is reclaimed at once, and not recomputed.

A scheduler calls ``hooks``, a launcher uses ``settings``. ``cache`` is
SGLang's unified radix cache with checkpoints. Its parts are ``request_checkpoint`` (host pages of a
running request), ``copy_jobs`` (copies in flight), ``host_space`` (host memory by
class), ``reclaim`` (freeing device and host memory), ``prefetch`` (loading back to the device).
``cpu`` and ``thread_streams`` replace pinned memory and CUDA streams on a CPU.
Importing this package imports no other module.
"""
