"""What the scheduler is told of a request beside its client's own parameters."""

from __future__ import annotations

from typing import Any

import pytest

from srt.batch_backend.served import Served


@pytest.mark.parametrize("asked", [{}, {"own": 1}])
def test_custom_params_are_sglangs_the_operators_and_ours(
    served: Served, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """As SGLang has it, the operator's are for who sends none."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_coserve.srt.marks.request_marks import said_by_client

    preferred = {"custom_params": {"of": "the operator"}}
    monkeypatch.setattr(served.manager, "preferred_sampling_params", preferred)
    monkeypatch.setattr(served.manager, "rid_to_state", {})
    params = {"max_new_tokens": 4, **({"custom_params": asked} if asked else {})}
    request = GenerateReqInput(text="x", sampling_params=params, max_thinking_tokens=5)
    request.normalize_batch_and_arguments()
    served.manager._init_req_state(request)
    with said_by_client({"coserve_class": "offline"}):
        sent = served.manager._create_tokenized_object(request, "x", [5, 6, 7])
    assert sent.sampling_params.custom_params == {
        **(asked or preferred["custom_params"]),
        "thinking_budget": 5,
        "coserve_class": "offline",
    }
