"""sglang_coserve: online and offline requests on one SGLang engine.

Importing this package is cheap: it loads neither torch nor sglang.
"""

from sglang_coserve import torchvision_schema

__version__ = "0.1.0"

# Here, because every process of a server imports this package before SGLang does.
torchvision_schema.install()
