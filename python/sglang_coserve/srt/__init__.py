"""What touches SGLang, but for ``guard``; no other package of this project imports SGLang."""

from sglang_coserve.errors import require

require("engine", "the engine")
