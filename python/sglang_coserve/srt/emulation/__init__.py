"""An emulated GPU: SGLang and co-serving run as they are, and layers only take a GPU's time.

SGLang imports this package where ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names it; nothing else does
unless an emulated model is served.
"""
