"""Records the calls made to a scheduler, and replays them.

A scheduler's plans depend only on the calls made to it. ``calls`` records them as values, which
``file`` writes and reads as JSON lines, and makes them again on a new scheduler from the same
``SchedulerSetup``, which must return the same plans.
"""
