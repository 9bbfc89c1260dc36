"""Compiles grammars in a separate process before the scheduler does, to reject harmful ones."""

from sglang_coserve.srt.grammar_trial.compilation import GrammarSettings
from sglang_coserve.srt.grammar_trial.trials import GrammarTrials

__all__ = ["GrammarSettings", "GrammarTrials"]
