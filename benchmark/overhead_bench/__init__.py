"""The parts of ``bench_overhead.py``."""
