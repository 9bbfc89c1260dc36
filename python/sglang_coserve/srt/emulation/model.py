"""The model that SGLang loads: its layers compute nothing, and take a GPU's time."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.model_executor.forward_context import get_token_to_kv_pool
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_server_args
from torch import nn

from sglang_coserve.core.latency_model.model import LatencyModel
from sglang_coserve.core.step_stats import StepStats
from sglang_coserve.srt.emulation.device_module import EmulatedDevice, emulated_device
from sglang_coserve.srt.emulation.settings import PLACES, Emulation

logger = logging.getLogger(__name__)

ForwardBatch = Any


class StepTimes:
    """What a latency model predicts, and what it does not know: noise, slow spells, its error.

    The same batches at the same times take the same, by the seed.
    """

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._model: LatencyModel = emulation.latency_model()
        self._noise = random.Random(f"noise {emulation.seed}")
        self._spells = random.Random(f"slow spells {emulation.seed}")
        self._spell_s = self._gap_s()
        """When the current slow spell began, or the next one will."""

    def seconds(self, batch: StepStats, now_s: float) -> float:
        """Return the seconds of a batch that is launched at ``now_s``; times never go back."""
        emulation = self._emulation
        seconds = self._model.predict(batch) * self._slowness(now_s)
        seconds *= _factor(self._noise, emulation.noise)
        if emulation.model_error:
            # Batches of about the same sizes run the same kernels.
            sizes = [value.bit_length() for value in batch]
            of_kernels = random.Random(f"model error {emulation.seed} {sizes}")
            seconds *= _factor(of_kernels, emulation.model_error)
        return seconds

    def _slowness(self, now_s: float) -> float:
        spells = self._emulation.slow_spells
        if spells is None:
            return 1.0
        while now_s >= self._spell_s + spells.last_s:
            self._spell_s += spells.last_s + self._gap_s()
        return spells.factor if now_s >= self._spell_s else 1.0

    def _gap_s(self) -> float:
        spells = self._emulation.slow_spells
        return math.inf if spells is None else self._spells.expovariate(1 / spells.every_s)


def _factor(source: random.Random, variation: float) -> float:
    """Draw from a lognormal distribution with mean 1 and this coefficient of variation."""
    if not variation:
        return 1.0
    sigma = math.sqrt(math.log1p(variation**2))
    return source.lognormvariate(-(sigma**2) / 2, sigma)


def stats_of(batch: ForwardBatch) -> StepStats:
    """Return the sums over the requests of a forward pass. O(requests).

    SGLang does not tell the decodes of a mixed batch from its prefills: what computes one token
    after a prefix counts as a decode.
    """
    mode = batch.forward_mode
    if mode.is_decode():
        known = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        keys = known.tolist()
        return StepStats(decode_requests=len(keys), decode_context_tokens=sum(keys))
    if not mode.is_extend():
        return StepStats()
    new, cached = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    lengths = [(int(tokens), int(context)) for tokens, context in zip(new, cached, strict=True)]
    decodes = [context for tokens, context in lengths if tokens == 1 and context > 0]
    prefills = [one for one in lengths if one[0] > 1 or (one[0] == 1 and not one[1])]
    return StepStats.of(prefills, decodes)


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
        self._waits: bool = get_server_args().disable_overlap_schedule
        """SGLang reads results as soon as a pass is launched, and a GPU lets it wait."""

        self.prefill_launch_s = emulation.prefill_launch_s
        """Unless it is 0, the launch of a pass with prefills waits for the pass before."""

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
        host_s = self.prefill_launch_s if forward_batch.forward_mode.is_extend() else 0.0
        if host_s:
            self._device.current_stream().synchronize()
        num_layers = len(self.layers)
        for layer in self.layers:
            hidden = layer(hidden, seconds / num_layers, host_s / num_layers)
        logits = self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)
        if self._waits:
            # Not the stream: SGLang lets a host that computes itself wait for none.
            self._device.current_stream().record_event().synchronize()
        return logits

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

    def forward(self, hidden: torch.Tensor, seconds: float, host_s: float) -> torch.Tensor:
        """Launch work of so many seconds, which takes the host ``host_s``.

        It waits for the layer's KV to be loaded.
        """
        get_token_to_kv_pool().get_key_buffer(self._number)
        if host_s:
            self._device.clock.wait_until(self._device.clock() + host_s)
        self._device.current_stream().launch(seconds)
        return hidden


EntryClass = EmulatedForCausalLM
"""By this name SGLang finds the class."""
