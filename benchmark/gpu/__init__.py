"""The steps of ``bench_gpu.py``: what to measure first when a GPU is there for minutes.

``steps`` lists them in order of value, ``driver`` runs as many as the time allows, each
in a process of its own (``child``) with results on disk (``record``, ``overview``). A
step's process begins in ``task``; the steps are the modules that ``steps`` names.
"""
