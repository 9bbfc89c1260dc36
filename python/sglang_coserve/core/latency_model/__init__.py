"""Predicts how long a step takes: linear models with three feature sets, and a roofline.

``predict`` and ``max_prefill_tokens`` answer the scheduler in constant time
from ``StepStats``. ``fit`` learns from measured steps, ``Refiner`` keeps
learning while serving, and ``LatencyProfile`` stores a model as JSON.
"""

from sglang_coserve.core.latency_model.hardware import HARDWARE, Hardware, find_hardware
from sglang_coserve.core.latency_model.linear import (
    BROS,
    CONSERVE,
    FEATURE_SETS,
    HYGEN,
    FeatureSet,
    LinearModel,
)
from sglang_coserve.core.latency_model.model import (
    Fit,
    FitReport,
    LatencyModel,
    Sample,
    SampleTable,
)
from sglang_coserve.core.latency_model.model_shape import ModelShape
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.latency_model.refiner import Refiner
from sglang_coserve.core.latency_model.roofline import RooflineModel

__all__ = [
    "BROS",
    "CONSERVE",
    "FEATURE_SETS",
    "HARDWARE",
    "HYGEN",
    "FeatureSet",
    "Fit",
    "FitReport",
    "Hardware",
    "LatencyModel",
    "LatencyProfile",
    "LinearModel",
    "ModelShape",
    "Refiner",
    "RooflineModel",
    "Sample",
    "SampleTable",
    "find_hardware",
]
