"""Parts of ``bench_gpu``: the steps as command lines (``steps``), and what runs them
(``driver``)."""
