"""Records the calls made to a scheduler, and replays them.

A scheduler's plans depend only on the calls made to it. ``RecordingScheduler`` records the
calls as events; ``replay`` makes them again on a new scheduler from the same
``SchedulerSetup``, which must return the same plans. ``EventEncoder`` and
``read_recording`` write and read recordings as JSON lines.
"""

from sglang_coserve.core.recording.decoder import read_recording
from sglang_coserve.core.recording.encoder import EventEncoder, encode_setup
from sglang_coserve.core.recording.events import (
    Arrived,
    Event,
    Finished,
    OfflineAdded,
    Planned,
    Restored,
    Started,
    Updated,
)
from sglang_coserve.core.recording.replay import ReplayedPlan, replay
from sglang_coserve.core.recording.report import PlanTally, ReplayReport, plan_text
from sglang_coserve.core.recording.scheduler import RecordingScheduler
from sglang_coserve.core.recording.setup import SchedulerSetup

__all__ = [
    "Arrived",
    "Event",
    "EventEncoder",
    "Finished",
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
    "encode_setup",
    "plan_text",
    "read_recording",
    "replay",
]
