"""Keeps one client's request from stopping the server, or its event loop, for the others.

It knows SGLang, but nothing of co-serving. An annex: ``setup`` is registered in
``srt.optional_parts``, and docs/security.md describes it. ``install`` puts it in place.

- ``bodies``: HTTP: bytes, bodies.
- ``threaded_handlers``: what is rendered and tokenized beside the event loop.
- ``engine_limits``, ``stop_patterns``, ``media_sources``: what a request asks for.
- ``tokenizer_manager``: where all requests pass, and these are called.
- ``grammars``, ``grammar_process``: the grammar that its output is to have.
- ``sampling``: what a request's logits may do to the others of its batch; its seed.
- ``compat``: differences between versions of SGLang.
- ``text_size``: the length of texts before they are tokenized.
"""
