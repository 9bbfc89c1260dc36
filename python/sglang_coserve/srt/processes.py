"""The processes of an engine, with co-serving in them.

SGLang spawns its processes from functions that a launcher may replace; these
replacements are plain module-level functions, because spawned processes find
them by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_coserve.errors import RequestError
from sglang_coserve.srt import compat, cpu
from sglang_coserve.srt.request_marks import check_marks

if TYPE_CHECKING:
    from sglang_coserve.srt.scheduler import CoserveScheduler

__all__ = [
    "init_tokenizer_manager",
    "run_detokenizer_process",
    "run_scheduler_process",
    "scheduler_class",
]

_IDLE_TIMEOUT_S = 60.0
"""The passes take less in which the scheduler finds out that its requests were aborted."""


def run_scheduler_process(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process with ours for its scheduler; takes its arguments."""
    from sglang.srt.managers import scheduler as sglang_scheduler

    from sglang_coserve.srt.kv_checkpoint.settings import register_cache
    from sglang_coserve.srt.scheduler import config_of

    on_cpu = not cpu.has_cuda()
    if on_cpu:
        cpu.install_replacements()
    register_cache(config_of(server_args), on_cpu=on_cpu)
    sglang_scheduler.Scheduler = scheduler_class(server_args)
    sglang_scheduler.run_scheduler_process(server_args, *args, **kwargs)


def scheduler_class(server_args: Any) -> type[CoserveScheduler]:
    """Return the scheduler that the settings on ``server_args`` ask for."""
    from sglang_coserve.srt.fifo_scheduler import FifoScheduler
    from sglang_coserve.srt.planned_scheduler import PlannedScheduler
    from sglang_coserve.srt.preemptive_scheduler import PreemptiveScheduler
    from sglang_coserve.srt.scheduler import config_of

    config = config_of(server_args)
    if config.offline_policy == "fifo":
        return FifoScheduler
    return PlannedScheduler if config.safepoint_interval == 0 else PreemptiveScheduler


def run_detokenizer_process(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's detokenizer process; being here, it imports this package first."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process as run

    run(*args, **kwargs)


def init_tokenizer_manager(server_args: Any, port_args: Any) -> tuple[Any, Any]:
    """Make SGLang's tokenizer manager, with more checks of every request."""
    from sglang.srt.entrypoints import engine

    from sglang_coserve.srt.arrival_time import install_arrival_times
    from sglang_coserve.srt.engine_death import is_stop_asked
    from sglang_coserve.srt.engine_limits import check_fatal_values
    from sglang_coserve.srt.media_sources import MediaSources
    from sglang_coserve.srt.scheduler import config_of
    from sglang_coserve.srt.threaded_manager import ThreadedTokenizerManager
    from sglang_coserve.srt.weight_updates import WeightUpdates

    allowed = config_of(server_args).media_sources
    media = None if allowed == "any" else MediaSources(allow_urls=allowed == "public")
    output_delay = install_arrival_times()

    class CoserveTokenizerManager(ThreadedTokenizerManager):
        """Answers a bad mark, or a value that would end the scheduler process, with the error
        of any invalid parameter; brings media itself; times the way of first tokens; tells of the
        engine's death and of other weights."""

        coserve_output_delay = output_delay

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.coserve_weights = WeightUpdates()
            self.coserve_on_death: Callable[[], None] | None = None
            """Called when the engine has ended by itself, right before this process does."""
            for name in compat.UPDATE_COMMUNICATORS:
                setattr(self, name, self._once_idle(getattr(self, name)))

        def dump_requests_before_crash(self, *args: Any, **kwargs: Any) -> None:
            # SGLang comes here from every failure after which it ends its processes.
            if self.coserve_on_death is not None and not is_stop_asked(self):
                self.coserve_on_death()
            super().dump_requests_before_crash(*args, **kwargs)

        async def update_weights_from_disk(self, obj: Any, *args: Any) -> Any:
            with self.coserve_weights.updating(empties_cache=obj.flush_cache):
                return await super().update_weights_from_disk(obj, *args)

        async def update_weights_from_distributed(self, obj: Any, *args: Any) -> Any:
            with self.coserve_weights.updating(empties_cache=obj.flush_cache):
                return await super().update_weights_from_distributed(obj, *args)

        async def update_weights_from_tensor(self, obj: Any, *args: Any) -> Any:
            with self.coserve_weights.updating(empties_cache=obj.flush_cache):
                return await super().update_weights_from_tensor(obj, *args)

        async def update_weights_from_ipc(self, obj: Any, *args: Any) -> Any:
            with self.coserve_weights.updating(empties_cache=obj.flush_cache):
                return await super().update_weights_from_ipc(obj, *args)

        async def _wait_for_model_update_from_disk(self, obj: Any) -> Any:
            return await self._once_idle(super()._wait_for_model_update_from_disk)(obj)

        def _once_idle(self, update: Callable[[Any], Any]) -> Callable[[Any], Any]:
            """Have ``update`` wait until the scheduler has nothing more of what was aborted.

            SGLang waits until nobody awaits an answer. What was aborted then is still in the
            scheduler for a pass, which ends its process when it cannot flush its cache.
            """

            async def update_once_idle(obj: Any) -> Any:
                if obj.flush_cache and not self.is_pause:
                    flushed = await self.flush_cache(timeout_s=_IDLE_TIMEOUT_S)
                    if not flushed.success:
                        raise ValueError(
                            f"the engine was not idle after {_IDLE_TIMEOUT_S:.0f} s, so that its"
                            " weights cannot be exchanged: try again"
                        )
                return await update(obj)

            return update_once_idle

        async def pause_generation(self, obj: Any) -> None:
            self.coserve_weights.pause()
            await super().pause_generation(obj)

        async def continue_generation(self, obj: Any) -> None:
            await super().continue_generation(obj)
            self.coserve_weights.resume()

        async def _handle_batch_output(self, recv_obj: Any) -> None:
            times = output_delay.without_token(recv_obj.rids, self.rid_to_state)
            await super()._handle_batch_output(recv_obj)
            output_delay.observe(times, recv_obj.time_stats)

        async def _tokenize_one_request(self, obj: Any) -> Any:
            # Without a processor SGLang leaves media where they are.
            if media is not None and self.mm_processor is not None and obj.contains_mm_input():
                self._validate_mm_limits(obj)
                await media.bring(obj)
            return await super()._tokenize_one_request(obj)

        def _validate_one_request(self, obj: Any, input_ids: Any) -> None:
            super()._validate_one_request(obj, input_ids)
            check_fatal_values(obj, self.model_config.vocab_size)
            try:
                check_marks(obj.sampling_params.get("custom_params"))
            except RequestError as error:
                # SGLang's doors turn a ValueError into a 400.
                raise ValueError(str(error)) from error

    managers: tuple[Any, Any] = engine.init_tokenizer_manager(
        server_args, port_args, CoserveTokenizerManager
    )
    return managers
