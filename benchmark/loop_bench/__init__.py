"""Parts of ``bench_event_loop``."""
