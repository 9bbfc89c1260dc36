"""Safepoints: suspend an offline step in the middle of its forward pass for an online arrival.

ConServe §4.3. Between groups of decoder layers the forward pass asks a gate (``instrument``,
``gates``), which receives what has come (``inbox``). For an online request the pass ends with an
exception. The step is resumed later, or dropped: its requests are retracted. ``docs/safepoints.md``
explains all of it.
"""
