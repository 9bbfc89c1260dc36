"""The model that SGLang loads: its layers compute nothing, and take a GPU's time."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_coserve.srt.emulation.device_module import EmulatedDevice, emulated_device
from sglang_coserve.srt.emulation.settings import PLACES, Emulation
from sglang_coserve.srt.emulation.step_times import StepTimes, stats_of

__all__ = ["EmulatedForCausalLM", "EntryClass"]

logger = logging.getLogger(__name__)


class EmulatedForCausalLM(nn.Module):
    """A language model whose next token depends on the last token and its position alone.

    So greedy outputs vary with the prompt, and are the same whatever batches and chunks it is
    computed in. The work of a whole step is launched in equal parts by its layers, on the stream
    on which SGLang runs them.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:  # noqa: ARG002
        super().__init__()
        if torch.distributed.get_world_size() > 1:
            raise ValueError(
                "an emulated model runs on one rank, which takes the time of all: remove --tp-size "
                "and --pp-size, and make the model with --tp"
            )
        emulation = Emulation.from_mapping(config.emulation, "config.json: emulation")
        self._device = emulated_device()
        self._device.copy_s_per_token = emulation.copy_s_per_token
        self._times = StepTimes(emulation)
        self.launched_s = 0.0
        """Of all passes so far."""

        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_places = nn.Embedding(PLACES, width)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([_Layer(number, self._device) for number in layers])
        self.lm_head = ParallelLMHead(config.vocab_size, width)
        self.logits_processor = LogitsProcessor(config)
        logger.warning("EMULATED: no GPU computes here: %s", emulation.name)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        **_options: Any,
    ) -> Any:
        """Return the logits of the tokens that SGLang asks for."""
        hidden = self.embed_tokens(input_ids) + self.embed_places(positions % PLACES)
        seconds = self._times.seconds(stats_of(forward_batch), self._device.clock())
        self.launched_s += seconds
        for layer in self.layers:
            hidden = layer(hidden, seconds / len(self.layers))
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the embeddings and the head."""
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            load = getattr(parameters[name], "weight_loader", default_weight_loader)
            load(parameters[name], weight)


class _Layer(nn.Module):
    def __init__(self, number: int, emulated: EmulatedDevice) -> None:
        super().__init__()
        self._number = number
        self._device = emulated
        # By it our safepoints and SGLang's pools know a decoder layer.
        self.attention = RadixAttention(1, 1, 1.0, 1, number)

    def forward(self, hidden: torch.Tensor, seconds: float) -> torch.Tensor:
        """Launch work of so many seconds; it waits for the layer's KV to be loaded."""
        get_token_to_kv_pool().get_key_buffer(self._number)
        self._device.current_stream().launch(seconds)
        return hidden


EntryClass = EmulatedForCausalLM
"""By this name SGLang finds the class."""
