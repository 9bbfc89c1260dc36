"""Engines with checkpoints, from which moved KV comes."""

from srt.kv_checkpoint.conftest import start_checkpointing as start_checkpointing
