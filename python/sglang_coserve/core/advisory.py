"""Keeps what only observes or advises from ending what it observes.

Essential is what moves requests: queues, batches, KV, answers. All else is advisory: it judges
latencies, learns, counts, publishes. Serving goes on without any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


class Advisory:
    """Calls advisory parts. One that raises is reported once, and not called again.

    The state of that part stays as it was: it may be half changed, and more calls would not mend
    it. Where a decision rests on the part, ``without`` names its replacement.
    """

    def __init__(self, report: Callable[[str, Exception], None] | None = None) -> None:
        """Have no part off.

        ``report`` is called with the name of a part that raised, and what. Without it errors are
        raised, as for a simulator or a test.
        """
        self._report = report
        self._off: dict[str, str] = {}
        self._without: dict[str, Callable[[], object]] = {}

    @property
    def off(self) -> Mapping[str, str]:
        """Why each part that is off is off."""
        return MappingProxyType(self._off)

    def without(self, part: str, call: Callable[[], object]) -> None:
        """Have ``call`` called once if the part is switched off; its errors are reported, too."""
        self._without[part] = call

    def tell(self, part: str, call: Callable[..., object], *args: object, **named: object) -> None:
        """Call a method of a part, unless the part is off."""
        self.ask(part, lambda: call(*args, **named), None)

    def ask(self, part: str, call: Callable[[], Any], otherwise: Any) -> Any:
        """Return what a part answers; ``otherwise`` if the part is off."""
        if part in self._off:
            return otherwise
        try:
            return call()
        except Exception as error:
            if self._report is None:
                raise
            self.switch_off(part, error)
            return otherwise

    def switch_off(self, part: str, error: Exception) -> None:
        """Do without a part from now on."""
        if self._report is not None and part not in self._off:
            self._off[part] = f"{type(error).__name__}: {error}"
            self._report(part, error)
            try:
                self._without.get(part, lambda: None)()
            except Exception as another:
                self._report(part, another)
