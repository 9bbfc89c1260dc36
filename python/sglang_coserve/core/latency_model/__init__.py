"""How long an iteration takes: four models behind one protocol.

``predict`` and ``max_prefill_tokens`` answer the scheduler in constant time
from ``BatchStats``; ``fit`` learns from measured iterations, ``Refiner`` keeps
learning while serving, and ``LatencyProfile`` carries a model between them.
"""

from sglang_coserve.core.latency_model.fitting import Fit, FitReport
from sglang_coserve.core.latency_model.hardware import HARDWARE, Hardware, find_hardware
from sglang_coserve.core.latency_model.linear import LinearModel
from sglang_coserve.core.latency_model.model_shape import ModelShape
from sglang_coserve.core.latency_model.polynomial import PolynomialModel
from sglang_coserve.core.latency_model.profile import LatencyProfile
from sglang_coserve.core.latency_model.protocol import (
    LatencyModel,
    coefficients,
    with_coefficients,
)
from sglang_coserve.core.latency_model.refiner import Refiner
from sglang_coserve.core.latency_model.roofline import RooflineModel
from sglang_coserve.core.latency_model.samples import Sample, SampleTable
from sglang_coserve.core.latency_model.split_linear import SplitLinearModel

__all__ = [
    "HARDWARE",
    "Fit",
    "FitReport",
    "Hardware",
    "LatencyModel",
    "LatencyProfile",
    "LinearModel",
    "ModelShape",
    "PolynomialModel",
    "Refiner",
    "RooflineModel",
    "Sample",
    "SampleTable",
    "SplitLinearModel",
    "coefficients",
    "find_hardware",
    "with_coefficients",
]
