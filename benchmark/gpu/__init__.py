"""Parts of ``bench_gpu``: the steps as command lines (``steps``), what runs them (``driver``), and
the measurements of two of them: ``safepoint`` and ``kv``."""
