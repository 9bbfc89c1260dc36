"""docs/examples for Kubernetes and docker compose: schemas, and flags, routes and names of ours."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from sglang_coserve.fleet.discovery import DnsName, EngineList
from sglang_coserve.fleet.gateway import gateway_app
from sglang_coserve.fleet.options import ENGINE_KEY_VARIABLE, GatewayOptions, parse_options
from sglang_coserve.web.asgi import ENGINE_PATHS
from srt.documentation.blocks import ROOT
from srt.monitoring.test_example import needs_prometheus, promtool
from srt.monitoring.test_exported import documented
from srt.test_documented_flags import (
    FLAG,
    flags_in,
    flags_of_routers,
    flags_of_server,
    flags_of_sglang,
)

EXAMPLES = ROOT / "docs" / "examples"
KUBERNETES, COMPOSE = EXAMPLES / "kubernetes", EXAMPLES / "compose"
KUBERNETES_VERSION = "1.32"

Object = dict[str, Any]


def objects() -> dict[tuple[str, str], Object]:
    """All of the Kubernetes example, by kind and name."""
    found = [
        each for file in KUBERNETES.glob("*.yml") for each in yaml.safe_load_all(file.read_text())
    ]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def container(kind: str, name: str) -> Object:
    (found,) = objects()[kind, name]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def services() -> dict[str, Object]:
    return dict(yaml.safe_load((COMPOSE / "docker-compose.yml").read_text())["services"])


def gateway_options(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> GatewayOptions:
    """What the gateway makes of a command line of an example."""
    monkeypatch.setenv(ENGINE_KEY_VARIABLE, "key")
    assert arguments[0] == "gateway"
    return parse_options(arguments[1:])


def check_engine(arguments: list[str]) -> None:
    assert arguments[0] == "serve"
    flags = {flag for argument in arguments[1:] for flag in FLAG.findall(argument)}
    assert len(flags) == len(arguments) - 1
    assert flags <= flags_of_server() | flags_of_sglang()


def routes_of_gateway(options: GatewayOptions) -> set[str]:
    app = gateway_app(options, lambda _: None)
    return {getattr(route, "path", "") for route in app.routes}


def test_objects_are_as_kubernetes_wants_them() -> None:
    kinds = set()
    for (kind, _), made in objects().items():
        kinds.add(kind)
        if kind != "ScaledObject":  # KEDA's, of which Kubernetes has no schema.
            kubernetes_validate.validate(made, KUBERNETES_VERSION, strict=True)
    assert {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "ConfigMap"} < kinds


def test_services_select_pods_and_the_gateway_finds_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = objects()
    pods = [
        each["spec"]["template"]["metadata"]["labels"]
        for (kind, _), each in found.items()
        if kind in ("Deployment", "StatefulSet")
    ]
    for (kind, _), each in found.items():
        if kind == "Service":
            assert each["spec"]["selector"] in pods
            assert [port["port"] for port in each["spec"]["ports"]] == [30000]
    headless = found["Service", "coserve-engines"]["spec"]
    assert headless["clusterIP"] == "None"
    gateway = container("StatefulSet", "coserve-gateway")
    options = gateway_options(gateway["args"], monkeypatch)
    (source,) = options.sources
    assert isinstance(source, DnsName)
    assert (source._name, source._port) == ("coserve-engines", 30000)
    (mount,) = gateway["volumeMounts"]
    assert options.data.is_relative_to(mount["mountPath"])


def test_containers_are_started_and_probed_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = container("Deployment", "coserve-engine")
    check_engine(engine["args"])
    probes = [engine[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    assert [probe["httpGet"]["path"] for probe in probes] == ["/health", "/health", "/ping"]
    gateway = container("StatefulSet", "coserve-gateway")
    options = gateway_options(gateway["args"], monkeypatch)
    assert (options.host, options.port) == ("0.0.0.0", 30000)
    paths = {gateway[f"{name}Probe"]["httpGet"]["path"] for name in ("readiness", "liveness")}
    assert paths <= routes_of_gateway(options)
    for each in (engine, gateway):
        used = set(re.findall(r"\$\((\w+)\)", " ".join(each["args"])))
        assert used <= {variable["name"] for variable in each["env"]}


def test_an_engine_drains_before_it_is_ended(tmp_path: Path) -> None:
    spec = objects()["Deployment", "coserve-engine"]["spec"]["template"]["spec"]
    (engine,) = spec["containers"]
    command = engine["lifecycle"]["preStop"]["exec"]["command"]
    # With programs that only say how they were called.
    for name in ("curl", "sleep"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COSERVE_ENGINE_ADMIN_KEY": "the key"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    drain = (
        "curl -fsS -X POST -H Authorization: Bearer the key http://localhost:30000/coserve/drain"
    )
    assert done.stdout.splitlines() == [drain, "sleep 15", f"{drain}?wait_s=240"]
    assert spec["terminationGracePeriodSeconds"] >= 15 + 240 + 10


def test_the_readme_makes_the_secret_that_pods_read() -> None:
    readme = (KUBERNETES / "README.md").read_text()
    made = set(re.findall(r"--from-literal=([\w-]+)=", readme))
    for kind, name in (("Deployment", "coserve-engine"), ("StatefulSet", "coserve-gateway")):
        for variable in container(kind, name)["env"]:
            reference = variable["valueFrom"]["secretKeyRef"]
            assert reference["name"] == "coserve" and reference["key"] in made
    assert "create secret generic coserve " in readme


def test_engines_are_scaled_by_metrics_that_there_are() -> None:
    found = objects()
    spec = found["ScaledObject", "coserve-engine"]["spec"]
    assert ("Deployment", spec["scaleTargetRef"]["name"]) in found
    # Replicas of its own would set back what KEDA decided, each time that it is applied.
    assert "replicas" not in found["Deployment", "coserve-engine"]["spec"]
    (trigger,) = spec["triggers"]
    asked = set(re.findall(r"coserve_\w+", trigger["metadata"]["query"]))
    assert "coserve_batch_required_tokens_per_second" in asked
    assert asked <= set(documented())


@needs_prometheus
@pytest.mark.parametrize(
    ("headroom", "engines"),
    [
        ({}, 4000 / 1e9),  # Before the first engine: one, whatever it will do.
        ({"a": "1000 1000 stale", "b": "3000 3000 stale"}, 2.0),  # None any more.
        ({"a": "1000 1000 stale", "b": "3000 3000 4000x9"}, 1.0),
        ({"a": "0x9"}, 4000.0),  # Online requests leave nothing: as many as there may be.
    ],
)
def test_what_batches_need_is_known_without_an_engine(
    headroom: dict[str, str], engines: float, tmp_path: Path
) -> None:
    (trigger,) = objects()["ScaledObject", "coserve-engine"]["spec"]["triggers"]
    series = [{"series": 'coserve_batch_required_tokens_per_second{pod="g"}', "values": "4000x9"}]
    for pod, values in headroom.items():
        name = f'coserve_headroom_tokens_per_second{{pod="{pod}"}}'
        series.append({"series": name, "values": values})
    query = {
        "expr": trigger["metadata"]["query"],
        "eval_time": "9m",
        "exp_samples": [{"labels": "{}", "value": engines}],
    }
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [query]}]
    file = tmp_path / "query.yml"
    file.write_text(yaml.safe_dump({"tests": tests}))
    promtool("test", "rules", str(file))


def test_the_compose_example_starts_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = services()
    engines = [f"http://{name}:30000" for name in found if name.startswith("engine-")]
    assert len(engines) == 2
    for name in ("engine-1", "engine-2"):
        check_engine(found[name]["command"])
    options = gateway_options(found["gateway"]["command"], monkeypatch)
    (source,) = options.sources
    assert isinstance(source, EngineList)
    assert list(source._urls) == engines
    router = found["router"]["command"]
    ports = {"gateway": options.port, "router": int(router[-1].removeprefix("--port="))}
    nginx = (COMPOSE / "nginx.conf").read_text()
    upstreams = re.findall(r"upstream (\w+) { server (\w+):(\d+); }", nginx)
    assert upstreams == [(name, name, str(port)) for name, port in ports.items()]
    address = found.pop("address")
    assert set(address["depends_on"]) == ports.keys()
    assert address["volumes"] == ["./nginx.conf:/etc/nginx/nginx.conf:ro"]
    (listens,) = re.findall(r"listen (\d+);", nginx)
    assert address["ports"] == [f"127.0.0.1:{listens}:{listens}"]
    assert [each for each in router if each.startswith("http")] == engines
    tested = flags_in(ROOT / "benchmark" / "chaos_bench" / "router.py") | flags_of_routers()
    assert {flag for each in router for flag in FLAG.findall(each)} <= tested
    # As docs/fleet.md says: or an engine that drains gets requests for minutes.
    assert "--health-check-interval-secs=5" in router
    targets = set(re.findall(r" AS (\w+)", (EXAMPLES / "Dockerfile").read_text()))
    for service in found.values():
        assert service["build"]["target"] in targets
        context = (COMPOSE / service["build"]["context"]).resolve()
        assert context == ROOT
        assert context / service["build"]["dockerfile"] == EXAMPLES / "Dockerfile"


def envoy() -> Object:
    """The configuration of Envoy in the Kubernetes example."""
    return dict(yaml.safe_load(objects()["ConfigMap", "coserve-address"]["data"]["envoy.yaml"]))


def envoys_connections() -> Object:
    (listener,) = envoy()["static_resources"]["listeners"]
    ((filters,),) = (chain["filters"] for chain in listener["filter_chains"])
    return dict(filters["typed_config"])


def envoys_routes() -> list[Object]:
    (clients,) = envoys_connections()["route_config"]["virtual_hosts"]
    return list(clients["routes"])


def test_envoy_knows_the_gateway_and_the_engines() -> None:
    found, parts = objects(), envoy()["static_resources"]
    clusters = {}
    for cluster in parts["clusters"]:
        assert cluster["load_assignment"]["cluster_name"] == cluster["name"]
        (endpoints,) = cluster["load_assignment"]["endpoints"]
        (address,) = (each["endpoint"]["address"] for each in endpoints["lb_endpoints"])
        assert address["socket_address"]["port_value"] == 30000
        clusters[cluster["name"]] = address["socket_address"]["address"]
    assert clusters == {"gateway": "coserve-gateway", "engines": "coserve-engines"}
    assert all(("Service", name) in found for name in clusters.values())
    for route in envoys_routes():
        if "route" in route:
            assert route["route"]["cluster"] in clusters
            # The default ends an answer after 15 s.
            assert route["route"]["timeout"] == "0s"
    container_of_it = container("Deployment", "coserve-address")
    (port,) = container_of_it["ports"]
    (listener,) = parts["listeners"]
    assert listener["address"]["socket_address"]["port_value"] == port["containerPort"]
    (mount,) = container_of_it["volumeMounts"]
    (volume,) = found["Deployment", "coserve-address"]["spec"]["template"]["spec"]["volumes"]
    assert volume == {"name": mount["name"], "configMap": {"name": "coserve-address"}}
    assert container_of_it["args"] == ["-c", f"{mount['mountPath']}/envoy.yaml"]


def goes_to(path: str, *, in_background: bool = False) -> str | int:
    """The cluster that Envoy's first matching route names, or the status that it answers."""
    for route in envoys_routes():
        match = route["match"]
        if "safe_regex" in match:
            is_it = re.fullmatch(match["safe_regex"]["regex"], path) is not None
        elif "prefix" in match:
            is_it = path.startswith(match["prefix"])
        else:
            is_it = path == match["path"]
        if is_it and (in_background or "headers" not in match):
            answer = route.get("direct_response")
            return int(answer["status"]) if answer else str(route["route"]["cluster"])
    return 404


def test_envoy_sends_each_request_to_who_has_it() -> None:
    for path in ("files", "files/file-1/content", "uploads/upload_1/parts", "batches/b/cancel"):
        assert goes_to(f"/v1/{path}") == "gateway"
    for path in (f"/v1/responses/resp_{0:024x}", f"/v1/responses/resp_{0:024x}/cancel"):
        assert goes_to(path) == "gateway"
    assert goes_to("/v1/responses", in_background=True) == "gateway"
    paths = [path for path in ENGINE_PATHS if path.startswith("/v1/")]
    for path in (*paths, f"/v1/responses/resp_{0:032x}", "/v1/models", "/v1/filesystem"):
        assert goes_to(path) == "engines"
    for path in ("/v1/loads", "/v1/tokenizers/a", "/workers", "/coserve/batches", "/metrics"):
        assert goes_to(path) == 404
    for name in ("readiness", "liveness"):
        probe = container("Deployment", "coserve-address")[f"{name}Probe"]
        assert goes_to(probe["httpGet"]["path"]) == 200


LUA = shutil.which("lua5.1")
"""The language of LuaJIT, which Envoy has."""

HANDLE = """
local said = {[":method"] = arg[1], [":path"] = arg[2], ["x-coserve-background"] = "forged"}
local headers = {
  get = function(_, name) return said[name] end,
  add = function(_, name, value) said[name] = value end,
  remove = function(_, name) said[name] = nil end,
}
local text = io.read("*a")
local body = {
  length = function() return #text end,
  getBytes = function(_, from, count) return text:sub(from + 1, from + count) end,
}
local was_read = false
envoy_on_request({
  headers = function() return headers end,
  body = function() was_read = true; return #text > 0 and body or nil end,
})
print(said["x-coserve-background"], was_read)
"""


@pytest.mark.skipif(LUA is None, reason="needs Debian's package lua5.1")
@pytest.mark.parametrize(
    ("request_line", "body", "says"),
    [
        ("POST /v1/responses", '{"input": "a", "background": true}', "true true"),
        ("POST /v1/responses?a=b", '{"background" :\n true}', "true true"),
        ("POST /v1/responses", '{"background": false}', "nil true"),
        ("POST /v1/responses", '{"input": "\\"background\\": true"}', "nil true"),
        ("POST /v1/responses", "", "nil true"),
        ("POST /v1/chat/completions", '{"background": true}', "nil false"),
        ("GET /v1/responses", "", "nil false"),
    ],
)
def test_envoy_reads_in_a_body_that_it_is_in_the_background(
    request_line: str, body: str, says: str, tmp_path: Path
) -> None:
    lua = next(
        each for each in envoys_connections()["http_filters"] if each["name"].endswith("lua")
    )
    script = tmp_path / "script.lua"
    script.write_text(lua["typed_config"]["default_source_code"]["inline_string"] + HANDLE)
    command = [str(LUA), str(script), *request_line.split()]
    done = subprocess.run(command, input=body, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == says.split()
