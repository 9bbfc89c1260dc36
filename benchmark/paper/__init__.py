"""The papers' experiments, simulated; ``bench_papers.py`` runs them."""
