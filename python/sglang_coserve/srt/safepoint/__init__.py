"""Safepoints: an online arrival interrupts an offline batch in the middle of a forward pass.

ConServe §4.3. Between groups of decoder layers the forward pass looks at a flag
(``instrument``, ``flag``); a thread that receives requests raises it when waiting for the
batch's end would cost an online request its first token in time (``monitor``,
``arrival_watch``); the pass then ends with an exception, and what it had taken is given
back (``rollback``). ``docs/safepoints.md`` has the whole picture.
"""
