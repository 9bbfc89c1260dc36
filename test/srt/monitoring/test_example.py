"""docs/examples/monitoring with a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from calls import call
from sglang_coserve.local_server import free_port
from srt.batch_server.deployment import API_KEY
from srt.monitoring.test_exported import ELSEWHERE, documented
from srt.monitoring.watched import Watched
from waiting import eventually

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "monitoring"
METRIC = re.compile(r"\bcoserve_\w+")

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="needs Debian's package prometheus",
)


def queries() -> list[str]:
    dashboard = json.loads((EXAMPLE / "grafana" / "dashboards" / "coserve.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(found) > 20
    return [found.replace("$model", ".*").replace("$__rate_interval", "1m") for found in found]


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((EXAMPLE / "alerts.yml").read_text())["groups"]
    return group["rules"]


def promtool(*arguments: str, given: str = "") -> str:
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=EXAMPLE,
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
def test_rules_and_settings_are_sound_and_alerts_fire_when_they_should() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    tested = (EXAMPLE / "alerts_test.yml").read_text()
    explained = (EXAMPLE / "README.md").read_text()
    for rule in rules():
        assert f"alertname: {rule['alert']}" in tested
        assert f"| `{rule['alert']}` |" in explained
        assert len(rule["annotations"]["runbook"]) > 40


def test_what_is_asked_for_is_documented() -> None:
    asked = {
        re.sub(r"_(bucket|count|sum)$", "", name)
        for text in (*queries(), *(rule["expr"] for rule in rules()))
        for name in METRIC.findall(text)
    }
    assert asked <= set(documented())


def test_the_compose_file_mounts_what_is_there() -> None:
    compose = yaml.safe_load((EXAMPLE / "docker-compose.yml").read_text())
    mounted = [
        volume.partition(":")[0]
        for service in compose["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert len(mounted) == 4
    assert all((EXAMPLE / path).exists() for path in mounted)


@needs_prometheus
def test_our_metrics_are_named_as_they_should_be(watched: Watched) -> None:
    text = watched.get("/metrics").raise_for_status().text
    ours = [line for line in text.splitlines() if re.match(r"(# \w+ )?coserve_", line)]
    promtool("check", "metrics", given="\n".join(ours) + "\n")


@pytest.fixture
def prometheus(watched: Watched, tmp_path: Path) -> Iterator[httpx2.Client]:
    """One that scrapes the server each second, with the example's rules."""
    settings = yaml.safe_load((EXAMPLE / "prometheus.yml").read_text())
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(EXAMPLE / "alerts.yml")]
    target = watched.base_url.removeprefix("http://")
    settings["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address={address}",
    ]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        httpx2.Client(base_url=f"http://{address}/api/v1", timeout=30) as client,
    ):
        try:
            eventually(lambda: is_up(client))
            yield client
        finally:
            process.terminate()


def is_up(client: httpx2.Client) -> bool:
    try:
        answer = client.get("/query", params={"query": "coserve_requests"})
    except httpx2.TransportError:
        return False
    return answer.status_code == 200 and bool(answer.json()["data"]["result"])


@needs_prometheus
def test_the_dashboards_queries_have_answers(watched: Watched, prometheus: httpx2.Client) -> None:
    for _ in range(3):
        body = {"text": "boats", "sampling_params": {"max_new_tokens": 4}}
        call(watched, "POST", "/generate", API_KEY, json=body).raise_for_status()
        time.sleep(1.5)  # Scraped and exported once a second.
    scraped = {re.sub(r"_(bucket|count|sum)$", "", name) for name, _ in watched.samples()}
    for query in queries():
        answer = prometheus.get("/query", params={"query": query}).raise_for_status().json()
        assert answer["status"] == "success", (query, answer)
        names = {re.sub(r"_(bucket|count|sum)$", "", name) for name in METRIC.findall(query)}
        assert names - scraped <= ELSEWHERE, query
        assert answer["data"]["result"] or not names <= scraped, query
    loaded = prometheus.get("/rules").json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in loaded} <= {"ok", "unknown"}
    assert len(loaded) == len(rules())
