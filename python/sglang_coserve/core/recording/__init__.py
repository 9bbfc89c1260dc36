"""What a scheduler was told and what it answered: recorded once, decided again at any time.

A scheduler's plans follow from the calls made to it. ``RecordingScheduler`` notes the
calls as events; ``replay`` makes them again on a fresh scheduler from the same
``SchedulerSetup``, which must answer with the same plans. ``EventEncoder`` and
``read_recording`` carry a recording through JSON lines.
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
