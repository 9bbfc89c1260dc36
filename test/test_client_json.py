"""Every place where a server process may parse JSON is known, with what bounds it.

Parsing holds the interpreter lock, and with it the event loop: what a client sends must be
measured first. So a new place belongs in the list below, with its bound.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[1] / "python" / "sglang_coserve"

ELSEWHERE: Final = {
    "bench_serving",
    "client",
    "demo",
    "simulator",
    "small_model.py",
    "workload",
}
"""What no server process runs."""

PARSERS: Final = {
    "ast.literal_eval",
    "json.load",
    "json.loads",
    "msgspec.json.Decoder",
    "msgspec.json.decode",
    "orjson.loads",
}
FUNCTIONS: Final = {"Decoder", "decode", "from_json", "load", "loads"}
METHODS: Final = {"model_validate_json", "parse_raw", "validate_json"}
MODULES: Final = {"json", "msgspec.json", "orjson", "pydantic_core", "simplejson", "ujson"}
BODY_METHODS: Final = {"delete", "patch", "post", "put"}

CALLERS: Final = "what calls it is a place, too"

NO_BODY: Final = "a route without a body"
OPERATOR: Final = "a file or an address of the operator's"
OURS: Final = "what another process of ours says"
SHORT_BODY: Final = "JsonRoute: 1 MiB, 11,000 values, 100 objects"
OWN_PROCESS: Final = "runs in a process of its own"

PLACES: Final[dict[str, str]] = {
    # Bodies of calls.
    "batch/routes/batches.py::create_batch": SHORT_BODY,
    "batch/routes/batches.py::change_batch": NO_BODY,
    "batch/routes/files.py::create_file": "a form, read by UploadForm as it comes",
    "batch/routes/files.py::delete_file": NO_BODY,
    "batch/routes/owners.py::move_owner": SHORT_BODY,
    "batch/responses/routes.py::create_response": "what _says_background has measured",
    "batch/responses/routes.py::_says_background": "check_body with the backend's limits",
    "batch/responses/routes.py::cancel_response": NO_BODY,
    "batch/responses/routes.py::delete_response": NO_BODY,
    "batch/uploads/routes.py::create_upload": SHORT_BODY,
    "batch/uploads/routes.py::complete_upload": SHORT_BODY,
    "batch/uploads/routes.py::cancel_upload": NO_BODY,
    "batch/uploads/routes.py::add_upload_part": "a form, read by UploadForm as it comes",
    "http_lines/line_server.py::serve_line": "BodyMeter with twice the limits of the gate",
    "http_lines/line_server.py::hand_line_back": "the same",
    "srt/marks/error_form.py::mended_error": "an error of a route of the server's own",
    "srt/routes/drain.py::drain_engine": NO_BODY,
    "srt/routes/drain.py::end_drain": NO_BODY,
    "srt/marks/marks_middleware.py::_fields": "the request gate",
    "srt/marks/wanted_model.py::_model_in": "the request gate",
    # Lines of uploaded files.
    "jsonl/request_line.py::parse_json": CALLERS,
    "jsonl/request_line.py::parse_request_line": CALLERS,
    "jsonl/request_line.py::line_head": CALLERS,
    "jsonl/request_line.py::id_in": "a line that JobLines has measured",
    "jsonl/request_line.py::_set_fields": "a few fields of a line, in line_head",
    "batch/responses/responses.py::_line": "a body that create_response has measured",
    "batch/job_lines.py::_parse": "check_body with the backend's limits",
    "lines/line_run.py::fresh_body": "the same line again, which JobLines has measured",
    "jsonl/check_file.py::_tokens": "64 KiB of a file, when its batch is permitted",
    "jsonl/check_file.py::_request": OWN_PROCESS,
    "jsonl/check_file.py::_large_request": OWN_PROCESS,
    "jsonl/check_file.py::main": OWN_PROCESS,
    "ray/fleet_lines.py::_answer": "check_body with the fleet's limits",
    "ray/fleet_lines.py::fresh_body": "the same line again",
    "ray/fleet_lines.py::_id_in": "a few fields of a line, in line_head",
    # Grammars in requests that have passed the request gate.
    "guard/grammar_process.py::_structural_tag": OWN_PROCESS,
    # What the engine has answered.
    "batch/responses/responses.py::_record": "an engine's answer",
    "http_lines/plain_server.py::_json_or_text": "an engine's answer",
    "lines/result_record.py::usage_in_record": "an engine's answer, after a crash",
    "srt/batch_backend/backend.py::line_result": "an error of SGLang's",
    # What our own processes say: the gateway, engines, schedulers, the database.
    "lines/result_record.py::decode_json": CALLERS,
    "http_lines/messages.py::decode_message": CALLERS,
    "http_lines/http_engine.py::_get": OURS,
    "http_lines/http_engine.py::_hear": OURS,
    "fleet/report.py::_ask": OURS,
    "lines/background.py::run_module": OURS,
    "guard/grammar_process.py::_fault_in_a_fork": OURS,
    "srt/monitoring/scheduler_query.py::asked": OURS,
    "batch/uploads/uploads.py::_find": "what create_upload has written",
    "fleet/served_model.py::remembered": OURS,
    "batch/store/records.py::decode": "up to 100 faults; metadata of SHORT_BODY",
    # What operators choose.
    "json_documents.py::read_json": OPERATOR,
    "config/config_file.py::_word": OPERATOR,
    "fleet/routed_engines.py::report": OPERATOR,
    "recording/file.py::<module>": OPERATOR,
    "recording/file.py::_setup": OPERATOR,
    "recording/file.py::encode_setup": OPERATOR,
    "srt/batch_backend/loaded_model.py::_safetensors_header": OPERATOR,
    "srt/emulation/model_directory.py::read_emulation": OPERATOR,
    "srt/emulation/settings.py::of": OPERATOR,
    "srt/kv_moves/kv_directory.py::_kv": OPERATOR,
    "srt/profiling/executor.py::machine_of": OPERATOR,
}
"""By ``module.py::function``."""


def places(of_callers: frozenset[str]) -> Iterator[str]:
    """Yield ``module.py::function`` for each place; ``of_callers`` are functions that parse."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module.split("/")[0] in ELSEWHERE:
            continue
        tree = ast.parse(path.read_text())
        imported = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in MODULES
            for name in node.names
            if name.name in FUNCTIONS
        }
        for function, node in walk(tree, "<module>"):
            if is_parser(node, imported | of_callers) or is_route_with_body(node):
                yield f"{module}::{function}"


def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child.name, child
            yield from walk(child, child.name)
        else:
            yield function, child
            yield from walk(child, function)


def is_parser(node: ast.AST, names: set[str] | frozenset[str]) -> bool:
    """Return whether a parser is named, called or passed on."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr == "json" and not node.args  # ``await request.json()``
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in PARSERS or node.attr in METHODS or node.attr in names
    return isinstance(node, ast.Name) and node.id in names


def is_route_with_body(node: ast.AST) -> bool:
    """Return whether this is a route whose body FastAPI would parse."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in BODY_METHODS
        for call in node.decorator_list
    )


def test_every_place_is_listed_with_its_bound() -> None:
    parsing = frozenset(
        place.partition("::")[2] for place, bound in PLACES.items() if bound == CALLERS
    )
    found = set(places(parsing))
    assert sorted(found - PLACES.keys()) == [], "add what bounds it, or measure the bytes first"
    assert sorted(PLACES.keys() - found) == [], "it is gone"
