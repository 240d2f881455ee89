import pytest

from isochunk.latency import LatencyModel
from isochunk.policies import (
    ChunkReason,
    EqualLatency,
    FixedChunk,
    Prefill,
    SolePrefillWindow,
    Step,
    chunk_alignment,
    fit_chunk,
)

MODEL = LatencyModel(fixed_ms=10.0, prefix_ms=0.0, token_ms=0.06, attention_ms=2e-5)


def policy(**changes: object) -> EqualLatency:
    settings = {"smooth_factor": 1.0, "min_chunk": 256, "alignment": 64} | changes
    return EqualLatency(MODEL, 4096, **settings)  # type: ignore[arg-type]


def split(chosen: EqualLatency, num_tokens: int, budget: int = 4096, cached: int = 0) -> list[int]:
    """Chunk sizes of a sole prompt."""
    chunks = []
    while cached < num_tokens:
        prefill = Prefill("r", cached, num_tokens - cached)
        chosen.begin_step(Step([prefill]))
        decision = chosen.size(prefill, min(budget, prefill.num_remaining))
        assert decision.reason is ChunkReason.MODEL
        chunks.append(decision.num_tokens)
        cached += decision.num_tokens
    return chunks


def test_chunks_take_equally_long() -> None:
    chunks = split(policy(), 32768)
    assert chunks[0] == 4096
    assert sum(chunks) == 32768
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True)
    # The last two may share a short rest.
    cached, times = 0, []
    for chunk in chunks:
        times.append(MODEL.predict_ms(cached, chunk))
        cached += chunk
    assert max(times[:-2]) / min(times[:-2]) < 1.2  # alignment to 64 of ~700 tokens


def test_smoothing_interpolates_between_fixed_and_fitted() -> None:
    fitted, half, fixed = (
        split(policy(smooth_factor=s, alignment=1), 16384)[1] for s in (1.0, 0.5, 0.0)
    )
    assert fixed == 4096
    assert half == pytest.approx((fitted + fixed) / 2, abs=1)


def test_no_last_chunk_below_the_minimum() -> None:
    """Case: 16 384 tokens, initial chunk 4096, smoothing 0.65 leaves a tiny rest elsewhere."""
    for min_chunk in (256, 512, 1024, 2048):
        for num_tokens in range(16384 - 600, 16384 + 600, 37):
            chunks = split(policy(smooth_factor=0.65, min_chunk=min_chunk), num_tokens)
            assert sum(chunks) == num_tokens
            assert max(chunks) <= 4096
            assert min(chunks) >= min_chunk, (min_chunk, num_tokens, chunks)


def test_rest_is_merged_where_cheap_else_split_evenly() -> None:
    prefill = Prefill("r", 8192, 1100)
    merged = fit_chunk(prefill, 1000, 4096, min_chunk=256, alignment=64, merge_limit=1200)
    assert merged == 1100
    halves = fit_chunk(prefill, 1000, 4096, min_chunk=256, alignment=64, merge_limit=1050)
    assert halves == 512  # half of it, aligned
    capped = fit_chunk(prefill, 1000, 1050, min_chunk=600, alignment=64)
    assert capped == 512  # below the minimum, but merging would break the cap


def test_unreachable_target_keeps_the_budget_and_says_so() -> None:
    steep = LatencyModel(fixed_ms=1.0, prefix_ms=0.1, token_ms=0.001, attention_ms=1e-9)
    chosen = EqualLatency(steep, 4096, smooth_factor=1.0, min_chunk=256, alignment=64)
    prefill = Prefill("r", 100_000, 50_000)
    chosen.begin_step(Step([prefill]))
    assert chosen.size(prefill, 4096) == (4096, ChunkReason.UNREACHABLE)


def test_fixed_while_another_prefill_was_there_in_the_last_16_steps() -> None:
    chosen = policy()
    long, other = Prefill("long", 8192, 50_000), Prefill("other", 0, 3000)
    chosen.begin_step(Step([long, other]))
    assert chosen.size(long, 4096) == (4096, ChunkReason.OTHER_PREFILLS)
    for _ in range(15):
        chosen.begin_step(Step([long]))
        assert chosen.size(long, 4096).reason is ChunkReason.OTHER_PREFILLS
    chosen.begin_step(Step([long]))
    assert chosen.size(long, 4096).reason is ChunkReason.MODEL


def test_window_counts_crowded_steps_exactly() -> None:
    window = SolePrefillWindow(num_steps=3)
    states = []
    for sources in (1, 2, 0, 1, 1, 3, 2, 1, 1, 1):
        window.add_step(sources)
        states.append(window.is_sole)
    assert states == [True, False, False, False, True, False, False, False, False, True]


@pytest.mark.parametrize("min_chunk", [0, -1, 4096, 5000])
def test_minimum_chunk_must_be_below_the_initial_one(min_chunk: int) -> None:
    with pytest.raises(ValueError, match=f"min_chunk={min_chunk}.*4096"):
        policy(min_chunk=min_chunk)


@pytest.mark.parametrize("smooth", [-0.1, 1.1, float("nan")])
def test_smoothing_must_be_a_fraction(smooth: float) -> None:
    with pytest.raises(ValueError, match="smooth_factor"):
        policy(smooth_factor=smooth)


def test_fixed_chunk() -> None:
    prefill = Prefill("r", 0, 10_000)
    assert FixedChunk().size(prefill, 4096) == (4096, ChunkReason.FIXED)
    assert FixedChunk(1000).size(prefill, 4096) == (1000, ChunkReason.FIXED)
    assert FixedChunk(9000).size(prefill, 4096) == (4096, ChunkReason.FIXED)


@pytest.mark.parametrize(
    ("block_size", "alignment"), [(1, 64), (16, 64), (64, 64), (128, 128), (48, 96), (528, 528)]
)
def test_alignment_is_a_multiple_of_the_block(block_size: int, alignment: int) -> None:
    assert chunk_alignment(block_size) == alignment
