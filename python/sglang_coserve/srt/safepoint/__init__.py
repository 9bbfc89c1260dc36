"""Safepoints: suspend an offline step in the middle of its forward pass for an online arrival.

ConServe §4.3. Between groups of decoder layers the forward pass checks a flag
(``instrument``, ``flag``). A thread that receives requests raises the flag when an online
request arrives (``monitor``, ``arrival_watch``), and the pass ends with an exception. The step
is resumed later (``resumption``), or dropped: its requests are retracted.
``docs/safepoints.md`` explains all of it.
"""
