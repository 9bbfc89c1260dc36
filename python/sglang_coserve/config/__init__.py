"""Our flags: frozen dataclasses, from which the command line is made."""

from sglang_coserve.config.batch_api import BatchApiConfig
from sglang_coserve.config.coserve import (
    FIELDS_WITHOUT_EFFECT,
    OFFLINE_POLICIES,
    CoserveConfig,
)

__all__ = [
    "FIELDS_WITHOUT_EFFECT",
    "OFFLINE_POLICIES",
    "BatchApiConfig",
    "CoserveConfig",
]
