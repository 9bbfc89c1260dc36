"""The tokenizer manager's side of the process that tries grammars."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from sglang_coserve.srt.grammar_trial.compilation import GrammarSettings

__all__ = ["TrialProcess"]

_MODULE = "sglang_coserve.srt.grammar_trial.process"

logger = logging.getLogger(__name__)


class TrialProcess:
    """A child process, which ends when this one does. For one thread.

    ``on_answer`` is called with the number of a question and what is wrong with its
    grammar, ``on_end`` when the process has ended; both from another thread.
    """

    def __init__(
        self,
        settings: GrammarSettings,
        *,
        on_answer: Callable[[int, str | None], object],
        on_end: Callable[[], object],
    ) -> None:
        # Not a process of ``multiprocessing``, which would import the server's main module.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions = Connection(os.dup(self._process.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._on_answer = on_answer
        self._on_end = on_end
        self._listener = threading.Thread(target=self._listen, name="grammar verdicts", daemon=True)
        self._listener.start()
        self._questions.send(settings)

    @property
    def is_alive(self) -> bool:
        """False once the process has ended."""
        return self._process.poll() is None

    def ask(self, number: int, kind: str, text: str) -> None:
        """Have a grammar tried.

        Raises:
            OSError: the process has ended.
        """
        self._questions.send((number, kind, text))

    def close(self) -> None:
        """End the process and wait until it has ended."""
        self._questions.close()
        self._listener.join()

    def _listen(self) -> None:
        try:
            while True:
                self._on_answer(*self._answers.recv())
        except (EOFError, OSError):
            logger.warning("the process that tries grammars has ended: %s", self._process.wait())
        except Exception:
            logger.exception("the process that tries grammars cannot be understood: it is ended")
        finally:
            # What it would still answer nobody would hear: the next grammar gets another process.
            self._process.kill()
            self._process.wait()
            self._on_end()
