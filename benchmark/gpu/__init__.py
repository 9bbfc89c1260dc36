"""Parts of ``bench_gpu``: the steps, what runs them, and the measurement of one of them."""
