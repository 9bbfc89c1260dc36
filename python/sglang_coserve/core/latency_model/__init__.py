"""Predicts how long a step takes: linear models with three feature sets, and a roofline.

``predict`` and ``max_prefill_tokens`` answer the scheduler in constant time
from ``StepStats``. ``fit`` learns from measured steps, and ``Refiner`` keeps
learning while serving. ``sglang_coserve.latency_profile`` stores a model as JSON.
"""
