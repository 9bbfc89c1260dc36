"""Records the calls made to a scheduler, and replays them.

A scheduler's plans depend only on the calls made to it. ``RecordingScheduler`` records the
calls as events; ``replay`` makes them again on a new scheduler from the same
``SchedulerSetup``, which must return the same plans. ``recording_file`` writes and reads
recordings as JSON lines.
"""

from sglang_coserve.core.recording.events import (
    Arrived,
    Cached,
    Event,
    Finished,
    NoRoom,
    OfflineAdded,
    Planned,
    Restored,
    Started,
    Updated,
)
from sglang_coserve.core.recording.replay import (
    PlanTally,
    ReplayedPlan,
    ReplayReport,
    plan_text,
    replay,
)
from sglang_coserve.core.recording.scheduler import RecordingScheduler, SchedulerSetup

__all__ = [
    "Arrived",
    "Cached",
    "Event",
    "Finished",
    "NoRoom",
    "OfflineAdded",
    "PlanTally",
    "Planned",
    "RecordingScheduler",
    "ReplayReport",
    "ReplayedPlan",
    "Restored",
    "SchedulerSetup",
    "Started",
    "Updated",
    "plan_text",
    "replay",
]
