"""Reads ``/coserve/view`` of a server."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Self

import httpx
import msgspec

from sglang_coserve.client.calls import server_address
from sglang_coserve.errors import ServerError, ServerGoneError
from sglang_coserve.view.shown_view import shown_view

__all__ = ["ViewClient"]

_TIMEOUT_S: Final = 10.0
_PATH: Final = "/coserve/view"


class ViewClient:
    """One connection to a server; a context manager."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        """Prepare the connection.

        Raises:
            ConfigError: the address or the key cannot be used.
        """
        self._address, headers = server_address(base_url, api_key)
        self._http = httpx.Client(
            base_url=self._address, headers=headers, timeout=_TIMEOUT_S, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def read(self, since_s: float = 0.0) -> dict[str, Any]:
        """Return the ``shown_view``, its history from ``since_s`` on, in seconds since the epoch.

        Raises:
            ServerGoneError: there is no answer.
            ServerError: the server refuses, or is none of ours.
        """
        try:
            answer = self._http.get(_PATH, params={"since": since_s})
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise ServerGoneError(
                f"{self._address}: no answer: {reason}: is the server there? --base-url says which"
            ) from error
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            raise ServerError(
                f"{self._address}: the server asks for its key: give its --api-key or "
                "--admin-api-key as --api-key, or in COSERVE_API_KEY"
            )
        if answer.status_code != HTTPStatus.OK:
            raise ServerError(
                f"{self._address}{_PATH}: answered with {answer.status_code}: is it a server of "
                "sglang_coserve, and as new as this command?"
            )
        try:
            view = msgspec.json.decode(answer.content, type=dict[str, Any])
            if "online_users" not in view:
                raise ValueError("it is no view")
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{self._address}{_PATH}: the answer cannot be read: {error}"
            ) from error
        return shown_view(view)
