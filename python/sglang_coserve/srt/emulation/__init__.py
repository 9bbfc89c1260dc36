"""An emulated GPU: SGLang and co-serving run as they are, and layers only take a GPU's time.

An annex: ``platform`` is registered in ``srt.optional_parts``, and docs/emulation.md describes it.
SGLang imports this package where ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names it.
"""
