"""Records the calls made to a scheduler, and replays them.

A scheduler's plans depend only on the calls made to it. ``scheduler`` records the calls as
``events``, which ``file`` writes and reads as JSON lines. ``replay`` makes them again on a new
scheduler from the same ``SchedulerSetup``, which must return the same plans.
"""
