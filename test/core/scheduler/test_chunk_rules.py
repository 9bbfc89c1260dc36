"""Plans keep the engine's rules about pieces of prompts, and no prompt waits for good."""

from __future__ import annotations

import pytest

from core.scheduler.policy_exceptions import SERVES_BY_URGENCY, all_but
from core.scheduler.scenarios import (
    NO_CACHE,
    offline,
    online,
    queued,
    scheduler,
    snapshot,
)
from sglang_coserve.core.request import RequestState
from sglang_coserve.core.snapshot import ChunkRules

DECODING = RequestState.DECODING
WHOLE = ChunkRules(may_cut=False)
ALIGNED = ChunkRules(align_tokens=256)


@pytest.mark.parametrize("policy", all_but(SERVES_BY_URGENCY))
@pytest.mark.parametrize(("rules", "tokens"), [(WHOLE, 900), (ALIGNED, 256)], ids=["whole", "cut"])
def test_an_online_prompt_begins_though_no_piece_keeps_the_targets_of_decodes(
    policy: str, rules: ChunkRules, tokens: int
) -> None:
    # A piece of 256 tokens takes 26 ms, and the decode has 20 ms.
    decode = online(20, DECODING, tpot_s=0.020)
    prompt = online(900, rid="prompt")
    plan = scheduler(policy, queued(rid="offline")).plan(
        snapshot(decode, prompt, offline(), chunk_rules=rules), NO_CACHE
    )
    first, *_ = plan.prefills
    assert first.rid == "prompt"
    assert first.tokens >= tokens
    assert first.tokens == 900 or first.tokens % 256 == 0


def test_short_offline_prompts_go_on_behind_one_whose_pieces_have_no_time_beside_decodes() -> None:
    core = scheduler("coserve", queued(900, rid="long"), queued(20, rid="short"))
    for rules in (WHOLE, ALIGNED):
        decode = online(20, DECODING, tpot_s=0.020)
        plan = core.plan(snapshot(decode, chunk_rules=rules), NO_CACHE)
        assert [chunk.rid for chunk in plan.prefills] == ["short"]
        plan = core.plan(snapshot(chunk_rules=rules), NO_CACHE)
        assert plan.prefills[0].rid == "long"


def test_prompts_go_first_where_a_step_has_no_tokens_for_them_beside_decodes() -> None:
    decodes = [online(20, DECODING) for _ in range(40)]
    seen = snapshot(*decodes, online(100, rid="prompt"), offline(), max_batch_tokens=32)
    plan = scheduler("coserve").plan(seen, NO_CACHE)
    assert plan.skips_decodes
    assert plan.prefills == (("prompt", 32),)


def test_a_prompt_that_must_not_be_cut_may_have_more_tokens_than_a_step() -> None:
    core = scheduler("coserve", queued(900, rid="long"), queued(20, rid="short"))
    plan = core.plan(snapshot(chunk_rules=WHOLE, max_batch_tokens=512), NO_CACHE)
    assert plan.prefills == (("long", 900),)
