"""Mends or refuses fields of chats, in the bodies of all routes and lines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from pydantic_core import PydanticCustomError

_TEMPLATE: Final = "chat_template"


class _Trust:
    in_templates = False
    """Whether clients may bring templates (``--trust-request-chat-template``)."""


def trust_templates(*, are_trusted: bool) -> None:
    """Allow or forbid requests a chat template of their own. Forbidden at first."""
    _Trust.in_templates = are_trusted


@cache
def template_arguments() -> frozenset[str]:
    """Return the arguments of ``apply_chat_template`` that are no variables of a template."""
    from transformers import PreTrainedTokenizerBase

    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return frozenset(name for name, each in parameters.items() if each.kind not in kinds)


def _variables(value: Any) -> Any:
    """Refuse ``chat_template_kwargs`` that are more than variables of the model's template.

    SGLang hands all of them to the tokenizer: a template of the client's takes any time and
    memory to render, and so does padding to any length.
    """
    if isinstance(value, Mapping):
        arguments = template_arguments() - ({_TEMPLATE} if _Trust.in_templates else set())
        for name in arguments.intersection(value):
            hint = " (or start the server with --trust-request-chat-template)"
            raise PydanticCustomError(
                "template_argument",
                "{name} is no variable of a chat template: leave it out{hint}",
                {"name": name, "hint": hint if name == _TEMPLATE else ""},
            )
    return value


def _arguments(value: Any) -> Any:
    """Take empty arguments of a call for an empty object, as some clients and models write it."""
    return "{}" if isinstance(value, str) and not value.strip() else value


def _input(value: Any) -> Any:
    """Do so in the calls of an input of ``/v1/responses``, which SGLang takes without a model."""
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return value  # Texts, or the tokens of prompts.
    return [
        {**item, "arguments": _arguments(item["arguments"])}
        if isinstance(item, dict) and "arguments" in item
        else item
        for item in value
    ]


CHAT_FIELDS: Final[Mapping[str, Callable[[Any], Any]]] = MappingProxyType(
    {"chat_template_kwargs": _variables, "arguments": _arguments, "input": _input}
)
"""Functions for the values of fields, by the name of the field, in any model."""
