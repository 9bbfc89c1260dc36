"""sglang_coserve: online and offline requests on one SGLang engine.

Importing this package is cheap: it loads neither torch nor sglang.
"""

__version__ = "0.1.0"
