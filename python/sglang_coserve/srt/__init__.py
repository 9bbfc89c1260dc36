"""Everything that touches SGLang; no other package of this project imports it."""

from sglang_coserve.extras import require

require("engine", "the engine")
