"""The parts of ``bench_coserve.py``: online and offline load on several systems, compared."""
