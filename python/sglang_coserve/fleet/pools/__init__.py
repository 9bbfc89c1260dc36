"""Pools of engines (OOCO §3.2): which running lines go on where online requests are served.

The decisions are a gateway's; ``core.migration`` has the paper's Algorithm 1. An annex:
``fleet.optional_parts`` alone imports this package (docs/pools.md).
"""
