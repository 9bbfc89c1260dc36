"""Makes SGLang importable: modules here import it, sorted before this project's package."""

import sglang_coserve  # noqa: F401
