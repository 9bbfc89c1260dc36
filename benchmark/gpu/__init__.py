"""Parts of ``bench_gpu``: the steps as command lines (``steps``), what runs them (``driver``), and
the measurement of one of them: ``safepoint``."""
