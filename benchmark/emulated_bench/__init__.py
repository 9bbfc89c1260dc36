"""Parts of ``bench_emulated``."""
