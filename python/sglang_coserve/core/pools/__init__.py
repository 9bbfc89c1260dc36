"""Pools of engines (OOCO §3.2): which running lines go on where online requests are served.

``line_pools`` decides in a gateway, ``migration`` has the paper's Algorithm 1. An annex:
``fleet.optional_parts`` and ``srt.kv_moves`` alone import this package (docs/pools.md).
"""
