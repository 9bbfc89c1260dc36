"""SGLang on a machine without CUDA: defaults, and replacements of its kernels.

An annex: ``platform`` is registered in ``srt.optional_parts``. The emulation builds on it.
"""
