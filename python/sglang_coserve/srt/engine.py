"""SGLang's in-process ``Engine`` with co-serving in place."""

from __future__ import annotations

import logging
from typing import Any

from sglang_coserve.config import CoserveConfig
from sglang_coserve.errors import StartupError
from sglang_coserve.srt import compat
from sglang_coserve.srt.optional_parts import KV_STORE, REQUEST_MOVES, platform_for

platform_for(None).set_environment_defaults()  # SGLang reads these when it is imported.
compat.check_version()

from sglang.srt.entrypoints.engine import Engine  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_coserve.srt import processes  # noqa: E402
from sglang_coserve.srt.monitoring.scheduler_query import STATE_KEY, replicas_info  # noqa: E402
from sglang_coserve.srt.start_defaults import (  # noqa: E402
    ANYWHERE,
    check_settings,
    set_up_platform,
)

logger = logging.getLogger(__name__)


class CoserveEngine(Engine):
    """``sglang.Engine`` with online and offline requests.

    Takes the keywords of ``sglang.Engine`` and ``coserve_config``. A request is
    offline if its sampling parameters contain
    ``{"custom_params": {"coserve_class": "offline"}}``.

    Raises:
        UnsupportedError: SGLang has another version, or a setting cannot be co-served.
        StartupError: a scheduler is not ours.
        ValueError: from ``generate``, for an unknown class.
    """

    init_tokenizer_manager_func = staticmethod(processes.init_tokenizer_manager)
    run_scheduler_process_func = staticmethod(processes.run_scheduler_process)
    run_detokenizer_process_func = staticmethod(processes.run_detokenizer_process)

    def __init__(self, *, coserve_config: CoserveConfig | None = None, **kwargs: Any) -> None:
        config = coserve_config or CoserveConfig()
        platform = set_up_platform(kwargs.get("model_path"))
        if platform.warning is not None:
            logger.warning(platform.warning)
        on_cpu = platform.on_cpu
        if "server_args" not in kwargs:
            kwargs = {**ANYWHERE, **platform.flags, **kwargs}
            kwargs.setdefault("log_level", "error")
            kwargs.update(KV_STORE.server_settings(kwargs, config, on_cpu=on_cpu))
            kwargs.update(REQUEST_MOVES.server_settings(config))
            kwargs = {"server_args": ServerArgs(**kwargs)}
        server_args = kwargs["server_args"]
        server_args._coserve = config
        check_settings(server_args, on_cpu=on_cpu)
        processes.watch_replicas()
        with platform.cores_for(server_args):
            super().__init__(**kwargs)
        states = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
        try:
            info = replicas_info(states)
        except StartupError:
            self.shutdown()
            raise
        self._scheduler_init_result.scheduler_infos[0][STATE_KEY] = info
