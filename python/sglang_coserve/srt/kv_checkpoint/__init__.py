"""Offline KV in host memory, so that reclaiming it costs nothing and resuming recomputes nothing.

``hooks`` is what a scheduler calls, ``settings`` what a launcher sets. ``cache`` is
SGLang's unified radix cache with checkpoints; its parts: ``row_checkpoint`` (a running
row's host pages), ``copy_jobs`` (copies under way), ``host_space`` (host memory by
class), ``reclaim`` (device memory back, page by page), ``prefetch`` (the way back).
``cpu`` and ``thread_streams`` stand in for pinned memory and CUDA streams.
Importing this package imports nothing else.
"""
