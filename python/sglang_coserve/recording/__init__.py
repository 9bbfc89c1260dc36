"""Records the steps of a scheduler, and makes their plans again.

The plans of a scheduler depend only on the calls made to it. ``calls`` records these calls and the
plans as values; ``file`` writes and reads one JSON line for each step. Replayed on a new scheduler
from the same ``SchedulerSetup``, the calls must lead to the same plans.
"""
