"""Parts of ``bench_safepoint``."""
