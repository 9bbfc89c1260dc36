"""Published times of steps and some of our own, each with its source.

Only times of one step, or from which one follows, with its batch and lengths stated, of 16-bit
weights on devices that the roofline knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["PUBLISHED", "SOURCES", "Published", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where times were published."""

    title: str
    engine: str
    """With its version, as far as that is stated."""

    url: str
    how: str
    """What a time is: as it was published, or how it follows from what was."""


@dataclass(frozen=True, slots=True)
class Published:
    """The time of a step, or what a token of a batch's outputs takes, prefill included."""

    source: str
    hardware: str
    model: str
    tp_size: int
    requests: int
    prompt_tokens: int
    """Of each request."""

    measured_ms: float
    """Of the prefill if ``output_tokens`` is 1; else of a decode, the mean over the outputs."""

    output_tokens: int = 1
    context_tokens: int = 0
    """In the KV cache before the prompt."""

    is_with_prefill: bool = False
    """Whether the prefill is spread over the output tokens."""

    has_cuda_graphs: bool = True
    """False for decodes whose kernels the host launches one by one."""

    is_calibration: bool = False
    """Whether the roofline's efficiencies were chosen from this time."""


SOURCES: Final = MappingProxyType(
    {
        "conserve": Source(
            "ConServe, §4.2",
            "the paper's own",
            "https://arxiv.org/abs/2410.01228",
            "as published",
        ),
        "tokenomics": Source(
            "Tokenomics from first principles (data of March 2025)",
            "vLLM server, bf16, random weights",
            "https://github.com/tugot17/tokenomics-from-first-principles/tree/"
            "fd98c6fa9694acb67eb63d1a55d3d53c1d6a2d43/experiments_massive",
            "prefill: requests for 1 token; decode: 1,000 tokens less 1 token, for each of 999; "
            "8B: requests for whole outputs",
        ),
        "argonne": Source(
            "LLM-Inference-Bench, Argonne National Laboratory",
            "TensorRT-LLM 0.11, fp16, static batches",
            "https://github.com/argonne-lcf/LLM-Inference-Bench/tree/"
            "4211f5d4e9bc0145ed541b6d372d5d8223b44235/Plots",
            "prefill: TTFT (Fig_22); decode: latency less TTFT, for each of 1,023; "
            "whole outputs: latency (All_results.csv)",
        ),
        "splitwise": Source(
            "Splitwise, performance model of its simulator",
            "vLLM of November 2023, before it had CUDA graphs, fp16",
            "https://github.com/Mutinifni/splitwise-sim/blob/"
            "8f99e7dc9b407f4ce2488d03dd44c0b8b946dab0/data/perf_model.csv",
            "prompt_time and token_time, median of five runs or more",
        ),
        "trt-llm 0.5": Source(
            "Performance of TensorRT-LLM 0.5.0",
            "TensorRT-LLM 0.5.0, fp16, static batches",
            "https://github.com/NVIDIA/TensorRT-LLM/blob/release/0.5.0/docs/source/performance.md",
            "prefill: first-token latency; whole outputs: batch ÷ output tokens/s",
        ),
        "lmdeploy": Source(
            "LMDeploy, benchmark on A100",
            "LMDeploy 0.1.0a1, fp16",
            "https://github.com/InternLM/lmdeploy/blob/"
            "3e391df4673326f79363eebe030876861a9b7090/docs/en/benchmark/a100_fp16.md",
            "prefill: mean first-token latency; decode: median token latency, in whole ms",
        ),
        "gpt-fast": Source(
            "gpt-fast",
            "PyTorch with torch.compile, bf16, GPUs limited to 330 W",
            "https://github.com/pytorch-labs/gpt-fast/blob/"
            "0f925b5d4ce457b89a7ca6c9ce50f42bf2576945/README.md",
            "1 ÷ tokens/s; the output's length is not stated, and matters little",
        ),
        "torchao": Source(
            "torchao, quantization benchmarks (the bfloat16 line)",
            "PyTorch with torch.compile, bf16",
            "https://github.com/pytorch/ao/blob/"
            "03d01adcbcf8f85b0e61bef84957013b89e6902f/torchao/quantization/README.md",
            "1 ÷ tokens/s, as gpt-fast; the A100's memory is not stated, it reads 1.44 TB/s",
        ),
        "ours": Source(
            "Profile of one H200, of 2026-11-26",
            "SGLang 0.5.17, FlashInfer, bf16, random weights",
            "https://github.com/sglang-coserve/sglang-coserve/tree/main/benchmark/results/gpu_h200",
            "one step of the model runner with its sampling, median of three runs or more",
        ),
    }
)

_8B: Final = "llama-3.1-8b"
"""Llama 3 and 3.1 have one shape."""

_70B: Final = "llama-3.1-70b"
"""Llama 3, 3.1 and 3.3 have one shape; Llama 2 has a smaller vocabulary, 1% of the weights."""

_7B: Final = "llama-2-7b"

PUBLISHED: Final = (
    # H100, prefill.
    Published("conserve", "h100", _8B, 1, 1, 2048, 51, is_calibration=True),
    Published("conserve", "h100", _8B, 1, 1, 2048, 124, context_tokens=40_000, is_calibration=True),
    Published("argonne", "h100", _8B, 1, 16, 1024, 405.42),
    Published("argonne", "h100", _7B, 1, 16, 1024, 386.52),
    Published("tokenomics", "h100", _70B, 4, 1, 2083, 189.2),
    Published("tokenomics", "h100", _70B, 4, 4, 2083, 651.5),
    Published("tokenomics", "h100", _70B, 4, 1, 8227, 684.9),
    Published("tokenomics", "h100", _70B, 4, 1, 32_803, 3266.8),
    Published("splitwise", "h100", _70B, 2, 1, 2048, 310.32),
    Published("splitwise", "h100", _70B, 4, 1, 2048, 200.68),
    # H100, decode.
    Published("argonne", "h100", _8B, 1, 16, 1024, (10_157.16 - 405.42) / 1023, 1024),
    Published("argonne", "h100", _7B, 1, 16, 1024, (11_633.26 - 386.52) / 1023, 1024),
    Published("argonne", "h100", _8B, 1, 1, 128, 896.75 / 128, 128, is_with_prefill=True),
    Published("argonne", "h100", _8B, 1, 64, 1024, 17_483.19 / 1024, 1024, is_with_prefill=True),
    Published("tokenomics", "h100", _8B, 1, 1, 2035, 2297.5 / 300, 300, is_with_prefill=True),
    Published("tokenomics", "h100", _8B, 1, 1, 16_035, 10_540.5 / 1000, 1000, is_with_prefill=True),
    Published("tokenomics", "h100", _8B, 1, 4, 16_035, 17_951.1 / 1000, 1000, is_with_prefill=True),
    Published("argonne", "h100", _70B, 4, 1, 128, 2312.34 / 128, 128, is_with_prefill=True),
    Published("argonne", "h100", _70B, 4, 64, 1024, 32_455.44 / 1024, 1024, is_with_prefill=True),
    Published("tokenomics", "h100", _70B, 4, 1, 1059, (17_986.7 - 108.0) / 999, 1000),
    Published("tokenomics", "h100", _70B, 4, 16, 2083, (24_448.1 - 2985.0) / 999, 1000),
    Published("tokenomics", "h100", _70B, 4, 4, 8227, (28_384.9 - 2673.3) / 999, 1000),
    Published("tokenomics", "h100", _70B, 4, 1, 32_803, (28_570.1 - 3266.8) / 999, 1000),
    Published("splitwise", "h100", _70B, 2, 1, 512, 37.00, 128, has_cuda_graphs=False),
    Published("splitwise", "h100", _70B, 4, 1, 512, 29.72, 128, has_cuda_graphs=False),
    # H200, prefill and decode.
    Published("ours", "h200", _8B, 1, 1, 512, 13.9),
    Published("ours", "h200", _8B, 1, 1, 1024, 24.5),
    Published("ours", "h200", _8B, 1, 1, 2048, 48.2),
    Published("ours", "h200", _8B, 1, 1, 4096, 99.0),
    Published("ours", "h200", _8B, 1, 1, 8192, 210.4),
    Published("ours", "h200", _8B, 1, 1, 1467, 5.71, 2),
    Published("ours", "h200", _8B, 1, 4, 256, 6.34, 2),
    Published("ours", "h200", _8B, 1, 4, 16_384, 7.90, 2),
    Published("ours", "h200", _8B, 1, 4, 32_703, 9.73, 2),
    Published("ours", "h200", _8B, 1, 16, 256, 6.58, 2),
    Published("ours", "h200", _8B, 1, 64, 256, 7.27, 2),
    Published("ours", "h200", _8B, 1, 128, 256, 8.78, 2),
    Published("ours", "h200", _8B, 1, 256, 256, 12.17, 2),
    # A100, prefill.
    Published("trt-llm 0.5", "a100", _7B, 1, 1, 128, 16),
    Published("trt-llm 0.5", "a100", _7B, 1, 1, 2048, 133),
    Published("lmdeploy", "a100", _7B, 1, 1, 2048, 139),
    Published("argonne", "a100", _8B, 1, 16, 1024, 1050.13),
    Published("trt-llm 0.5", "a100", _70B, 4, 1, 128, 47),
    Published("trt-llm 0.5", "a100", _70B, 4, 1, 2048, 377),
    Published("lmdeploy", "a100", _70B, 4, 1, 2048, 402),
    Published("splitwise", "a100", _70B, 2, 1, 2048, 688.05),
    Published("splitwise", "a100", _70B, 4, 1, 2048, 403.33),
    # A100, decode.
    Published("gpt-fast", "a100", _7B, 1, 1, 5, 1000 / 104.9, 200),
    Published("torchao", "a100", _8B, 1, 1, 5, 1000 / 95.64, 200),
    Published("lmdeploy", "a100", _7B, 1, 16, 128, 15, 2048),
    Published("lmdeploy", "a100", _7B, 1, 64, 128, 30, 2048),
    Published("lmdeploy", "a100", _7B, 1, 32, 2048, 40, 2048),
    Published("trt-llm 0.5", "a100", _7B, 1, 64, 128, 64_000 / 3486, 128, is_with_prefill=True),
    Published("trt-llm 0.5", "a100", _7B, 1, 32, 128, 32_000 / 1459, 2048, is_with_prefill=True),
    Published("trt-llm 0.5", "a100", _7B, 1, 16, 2048, 16_000 / 592, 2048, is_with_prefill=True),
    Published("gpt-fast", "a100", _7B, 4, 1, 5, 1000 / 254.02, 200),
    Published("gpt-fast", "a100", _70B, 2, 1, 5, 1000 / 21.32, 200),
    Published("gpt-fast", "a100", _70B, 4, 1, 5, 1000 / 38.01, 200),
    Published("gpt-fast", "a100", _70B, 8, 1, 5, 1000 / 62.5, 200),
    Published("lmdeploy", "a100", _70B, 4, 1, 128, 31, 2048),
    Published("lmdeploy", "a100", _70B, 4, 16, 128, 33, 2048),
    Published("lmdeploy", "a100", _70B, 4, 64, 128, 43, 2048),
    Published("lmdeploy", "a100", _70B, 4, 64, 2048, 55, 2048),
    Published("splitwise", "a100", _70B, 4, 1, 512, 44.99, 128, has_cuda_graphs=False),
)
