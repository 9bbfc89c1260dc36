"""A discrete-event simulator that drives the production scheduler.

- ``run``: one workload under one policy; ``options``: the settings of a user.
- ``engine``: the event loop.
- ``executor``: carries out plans on counters; ``request``, ``running_step``: its state;
  ``prefix_cache``, ``request_kv``, ``host_kv``: the location of KV.
- ``binding``, ``assemble``: requests and machines, from workloads and names.
- ``find_budget``: the largest step budget that meets the SLOs.
- ``observer``, ``result``, ``report``: output.

All output is marked as simulated.
"""
