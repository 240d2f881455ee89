from hypothesis import given, settings
from hypothesis import strategies as st

from isochunk.policies import ChunkReason, EqualLatency, Prefill, Step, fit_chunk
from tests.property.test_latency_properties import MODELS

ALIGNMENTS = st.sampled_from([1, 16, 64, 96, 128, 528])


@given(
    cached=st.integers(0, 1_000_000),
    remaining=st.integers(1, 1_000_000),
    wanted=st.integers(1, 70_000),
    allowed=st.integers(1, 65_536),
    min_chunk=st.integers(1, 8192),
    alignment=ALIGNMENTS,
)
def test_fitted_chunk_is_always_one_the_engine_can_run(  # noqa: PLR0917
    cached: int, remaining: int, wanted: int, allowed: int, min_chunk: int, alignment: int
) -> None:
    allowed = min(allowed, remaining)
    prefill = Prefill("r", cached, remaining)
    chunk = fit_chunk(prefill, wanted, allowed, min_chunk=min_chunk, alignment=alignment)
    assert 1 <= chunk <= allowed
    if allowed >= 2 * (min_chunk + alignment) and remaining >= 2 * (min_chunk + alignment):
        is_last = chunk == remaining
        assert is_last or (cached + chunk) % alignment == 0 or chunk == min(wanted, allowed)
        assert is_last or remaining - chunk >= min(min_chunk, remaining // 2 - alignment)


@settings(deadline=None)
@given(
    model=MODELS,
    num_tokens=st.integers(1, 300_000),
    cached=st.integers(0, 100_000),
    budget=st.sampled_from([1024, 3072, 5000, 8192, 16384]),
    min_chunk=st.integers(1, 900),
    alignment=ALIGNMENTS,
    smooth=st.floats(0, 1),
    decodes=st.lists(st.integers(0, 64), min_size=1, max_size=5),
)
def test_every_prompt_is_covered_exactly_within_the_budget(  # noqa: PLR0917
    model, num_tokens, cached, budget, min_chunk, alignment, smooth, decodes
) -> None:
    """Also with a cached prefix and decode tokens that take a part of each step's budget."""
    policy = EqualLatency(
        model, budget, smooth_factor=smooth, min_chunk=min_chunk, alignment=alignment
    )
    fresh = Prefill("r", 0, 10 * budget)
    policy.begin_step(Step([fresh]))
    first = policy.size(fresh, budget).num_tokens
    if budget - budget % alignment >= min_chunk:
        assert first == budget - budget % alignment  # the initial chunk is the budget, exactly
    end, steps = cached + num_tokens, 0
    while cached < end:
        prefill = Prefill("r", cached, end - cached)
        allowed = min(budget - decodes[steps % len(decodes)], prefill.num_remaining)
        policy.begin_step(Step([prefill], decodes[steps % len(decodes)]))
        chunk, reason = policy.size(prefill, allowed)
        assert 1 <= chunk <= allowed
        assert reason in (ChunkReason.MODEL, ChunkReason.UNREACHABLE)
        cached += chunk
        steps += 1
        if steps > 400:  # tiny chunks of a huge prompt: covered by progress in each step
            break
    assert cached <= end
