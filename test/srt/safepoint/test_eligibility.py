"""Which engines and batches are told apart, and why: those that cannot be suspended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.srt import compat
from sglang_coserve.srt.safepoint.instrument import decoder_layers
from sglang_coserve.srt.safepoint.safepoints import (
    Safepoints,
    install_safepoints,
    why_batch_must_end,
    why_no_safepoints,
)
from srt.safepoint.modes import QUICK, start
from srt.scripted_engine import ScriptedEngine


class Changed:
    """An object of SGLang's with other values, which it may refuse to be given itself."""

    def __init__(self, original: Any, **values: Any) -> None:
        self._original = original
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def reasons_against(engine: ScriptedEngine) -> list[str]:
    """Return the reasons for engines like this one, but for one thing each."""
    scheduler = engine.scheduler
    layers = decoder_layers(scheduler.tp_worker.model_runner.model)
    for same in (Changed(scheduler), Changed(scheduler, device="cuda")):
        assert why_no_safepoints(same, layers) is None
    found = [why_no_safepoints(scheduler, [])]
    others = (
        Changed(scheduler, device="npu"),
        Changed(scheduler, device="cuda", enable_unified_memory=True),
        Changed(scheduler, server_args=Changed(scheduler.server_args, enable_torch_compile=True)),
        Changed(scheduler, is_generation=False),
        Changed(scheduler, model_config=Changed(scheduler.model_config, is_encoder_decoder=True)),
    )
    found += [why_no_safepoints(other, layers) for other in others]
    two_stages = Changed(compat.parallel(scheduler), pp_size=2)
    with patch.object(compat, "parallel", return_value=two_stages):
        found.append(why_no_safepoints(scheduler, layers))
    assert None not in found
    return [str(reason) for reason in found]


def test_engines_that_cannot_be_suspended_are_told_apart(start_engine: Any) -> None:
    reasons = start(start_engine, QUICK[0]).call(reasons_against)
    assert len(set(reasons)) == len(reasons)
    assert "no list of decoder layers was found in the model" in reasons


def batch_of(hicache_consumer_index: int = -1, **fields: Any) -> Any:
    """As much of a batch as the question is about: a plain decode, and one more request."""
    plain = {"session": None, "multimodal_inputs": None, "input_embeds": None}
    reqs = [SimpleNamespace(**{**plain, **fields}), SimpleNamespace(**plain)]
    return SimpleNamespace(hicache_consumer_index=hicache_consumer_index, reqs=reqs)


def test_batches_that_cannot_be_suspended_are_told_apart() -> None:
    something = object()
    assert why_batch_must_end(batch_of(), 1) is None
    # The images and embeddings of a request that decodes have done their part.
    assert why_batch_must_end(batch_of(multimodal_inputs=something), 0) is None
    reasons = {
        why_batch_must_end(batch_of(**values), 1)
        for values in (
            {"hicache_consumer_index": 3},
            {"session": something},
            {"multimodal_inputs": something},
            {"input_embeds": something},
        )
    }
    assert len(reasons) == 4
    assert None not in reasons


def test_an_engine_without_safepoints_says_why() -> None:
    state = Safepoints.none("a reason").state()
    assert state == {"safepoints": {"enabled": False, "reason": "a reason"}}


@pytest.mark.parametrize(
    "values",
    [{"offline_policy": "non_preemptive"}, {"offline_policy": "conserve", "safepoint_interval": 0}],
)
def test_what_is_not_asked_for_leaves_the_model_alone(values: dict[str, Any]) -> None:
    nothing_to_install_into = object()
    assert install_safepoints(nothing_to_install_into, CoserveConfig(**values)).state() == {}
    with pytest.raises(AttributeError, match="tp_worker"):
        install_safepoints(nothing_to_install_into, CoserveConfig(offline_policy="conserve"))
