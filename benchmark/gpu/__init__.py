"""Parts of ``bench_gpu``: the steps, and what runs them."""
