"""Grammars are compiled where they can harm nobody, before the scheduler compiles them."""

from sglang_coserve.srt.grammar_trial.compilation import GrammarSettings
from sglang_coserve.srt.grammar_trial.trials import GrammarTrials

__all__ = ["GrammarSettings", "GrammarTrials"]
