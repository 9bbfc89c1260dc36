"""Composes a step: online work, the offline work that fits beside it, or a lane of its own."""
