"""The Batch API's flags of the server."""

from __future__ import annotations

import argparse

import pytest

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import ConfigError


def parsed(*flags: str) -> CoserveConfig:
    parser = argparse.ArgumentParser()
    CoserveConfig.add_cli_args(parser)
    return CoserveConfig.from_mapping(vars(parser.parse_args(flags)))


def test_nothing_is_kept_unasked() -> None:
    config = parsed()
    assert config.coserve_data_dir is None
    assert (config.batch_max_upload_mib, config.batch_max_lines) == (200, 50_000)


def test_every_flag_is_taken() -> None:
    config = parsed(
        *("--coserve-data-dir", "data", "--batch-max-upload-mib", "2048"),
        *("--batch-max-lines", "1000000", "--batch-webhook-url", "https://example.org/hook"),
        "--batch-webhook-allow-private",
    )
    assert config.coserve_data_dir == "data"
    assert (config.batch_max_upload_mib, config.batch_max_lines) == (2048, 1_000_000)
    assert config.batch_webhook_url == "https://example.org/hook"
    assert config.batch_webhook_allow_private


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_max_upload_mib": 0}, "--batch-max-upload-mib must be greater than 0"),
        ({"batch_max_lines": -1}, "--batch-max-lines must be greater than 0"),
        ({"batch_webhook_url": "https://example.org/"}, "add --coserve-data-dir"),
    ],
)
def test_values_that_cannot_be_used(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CoserveConfig.from_mapping(settings)
