"""Parts of ``bench_interference``."""
