"""Calls that cannot be served, and the HTTP status of each."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType

from sglang_coserve.errors import RequestError


class ApiError(RequestError):
    """One call cannot be served as asked."""

    status = HTTPStatus.BAD_REQUEST
    headers: Mapping[str, str] = MappingProxyType({})
    """Headers of the answer, beside those of every error."""

    code = ""
    """The error's ``code``, as in OpenAI's error objects."""

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.param = param
        """The parameter at fault; None if there is not exactly one."""


class NoAdminKeyError(ApiError):
    """The server has no admin key, so nobody can be its operator."""

    status, code = HTTPStatus.FORBIDDEN, "no_admin_key"


class AdminKeyError(ApiError):
    """The caller does not bring the admin key."""

    status, code = HTTPStatus.UNAUTHORIZED, "invalid_api_key"
    headers = MappingProxyType({"www-authenticate": "Bearer"})
