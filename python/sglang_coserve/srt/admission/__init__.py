"""Who is admitted when: ``protocol`` says what a scheduler asks, ``fifo`` and ``planned`` answer.

``fifo`` serves offline requests first come, first served, while no online one waits.
``planned`` carries out the plans of ``core.scheduler``.
"""
