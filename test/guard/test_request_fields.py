"""Every field of a request of the installed SGLang is decided on; what is not is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_coserve.errors import RequestError
from sglang_coserve.guard.engine_limits import check_request
from sglang_coserve.guard.request_fields import FIELDS, PARAMS, Rule
from sglang_coserve.guard.tokenizer_manager import _is_body

KINDS = (GenerateReqInput, EmbeddingReqInput)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_sorted(kind: Any) -> None:
    unsorted = [field.name for field in dataclasses.fields(kind) if field.name not in FIELDS]
    assert unsorted == []


def test_every_sampling_parameter_is_sorted() -> None:
    unsorted = [f.name for f in msgspec.structs.fields(SamplingParams) if f.name not in PARAMS]
    assert unsorted == []


def test_a_field_that_is_not_sorted_is_refused() -> None:
    newer = make_dataclass(
        "GenerateReqInput", [("reads_rows", Any, None)], bases=(GenerateReqInput,)
    )
    check_request(newer(text="a"))
    for given_by_client in (True, False):
        with pytest.raises(RequestError, match="'reads_rows' is no field that co-serving knows"):
            check_request(newer(text="a", reads_rows=[5]), given_by_client=given_by_client)
    with pytest.raises(RequestError, match="'reads_rows' is no field"):
        check_request(GenerateReqInput(text="a", sampling_params={"reads_rows": 1}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_servers_fields_are_refused_from_clients_only(kind: Any) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    names = [name for name in defaults if FIELDS[name] in (Rule.SERVER, Rule.REFUSED)]
    assert len(names) > 9
    for name in names:
        for value in ([], [1], {}, "x", 0.0, not defaults[name]):
            request = kind(text="a", **{name: value})
            with pytest.raises(RequestError, match=f"{name} is .*: leave it out"):
                check_request(request)
            if FIELDS[name] is Rule.SERVER:
                check_request(request, given_by_client=False)
        check_request(kind(text="a", **{name: defaults[name]}))


def test_what_a_processor_has_computed_is_not_taken_from_clients() -> None:
    for kind in ("processor_output", "precomputed_embedding"):
        item = {"format": kind, "feature": [[0.5]], "hash": 1}
        for value in (item, [item], [["data:,"], [item]]):
            request = GenerateReqInput(text="a", image_data=value)
            with pytest.raises(RequestError, match="image_data: computed features"):
                check_request(request)
            check_request(request, given_by_client=False)


def test_the_bodies_of_some_routes_are_requests_of_sglang() -> None:
    routes = {route.path: route for route in app.routes if hasattr(route, "path")}

    def is_body(path: str) -> bool:
        return _is_body(SimpleNamespace(scope={"route": routes[path]}))

    assert all(map(is_body, ("/generate", "/encode", "/classify", "/vertex_generate")))
    assert not any(map(is_body, ("/v1/chat/completions", "/v1/embeddings", "/health")))
    assert not _is_body(None)
