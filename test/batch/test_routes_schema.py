"""Whatever fits the OpenAPI document, or just does not, gets an answer that the document names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from batch.live_app import LiveApp
from batch.scripted_backend import ScriptedBackend
from sglang_coserve.batch.api import add_batch_routes


def document() -> dict[str, Any]:
    app = FastAPI()
    add_batch_routes(app)
    return app.openapi()


OPERATIONS = {
    result.ok().label: result.ok()
    for result in schemathesis.openapi.from_dict(document()).get_all_operations()
}


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LiveApp(tmp_path_factory.mktemp("data"), ScriptedBackend()) as app:
        yield app.base_url


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_every_call_is_answered_as_documented(
    base_url: str, operation: Any, mode: GenerationMode
) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=10, suppress_health_check=list(HealthCheck))
    def answered(case: Any) -> None:
        # A file that is there, a duration: no schema says it all.
        case.call_and_validate(base_url=base_url, excluded_checks=[positive_data_acceptance])

    answered()


def test_the_document_names_every_route() -> None:
    app = FastAPI(openapi_url=None)
    add_batch_routes(app)
    routes = {(m.lower(), r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods}
    named = {(method, path) for path, item in document()["paths"].items() for method in item}
    assert named == routes
