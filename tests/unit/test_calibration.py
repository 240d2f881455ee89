"""The calibration's state machine, driven like an engine would, on synthetic machines."""

from typing import Any

import numpy as np
import pytest

from isochunk.calibration import CalibrationPhase, Calibrator
from isochunk.chunk_plan import plan_chunks
from isochunk.fitting import ChunkSample, FitChecks
from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.policies import ChunkReason, EqualLatency, Prefill, Step
from isochunk.probes import MAX_SWEEP_SIZES, plan_probes, plan_sweep
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.stages import slowest_stage

STAGE_0 = LatencyModel(10.0, 0.001, 0.06, 2e-5)
STAGE_1 = LatencyModel(12.0, 0.001, 0.07, 2.4e-5)


def calibrator(**changes: Any) -> Calibrator:
    settings = {
        "budget": 4096,
        "min_chunk": 512,
        "alignment": 64,
        "num_stages": 2,
        "max_model_len": 32768,
    } | changes
    chunks = {"min_chunk": settings["min_chunk"], "alignment": settings["alignment"]}
    settings.setdefault(
        "make_policy",
        lambda models: EqualLatency(models[1], settings["budget"], smooth_factor=1.0, **chunks),
    )
    return Calibrator(**settings)


def swept(**changes: Any) -> Calibrator:
    chosen = calibrator(**changes)
    for stage, model in enumerate((STAGE_0, STAGE_1)):
        chosen.add_sweep(stage, [(x, 8 + model.token_ms * x) for x in range(170, 4097, 170)])
    return chosen


def prefill_prompt(
    chosen: Calibrator, request_id: str, num_tokens: int = 16384, noise: float = 0.01
) -> list[int]:
    """One sole prompt through the calibrator; returns its chunk sizes."""
    rng = np.random.default_rng(len(request_id) + num_tokens)
    cached, chunks = 0, []
    while cached < num_tokens:
        prefill = Prefill(request_id, cached, num_tokens - cached)
        chosen.begin_step(Step([prefill]))
        chunk, reason = chosen.size(prefill, min(chosen.budget, prefill.num_remaining))
        if reason is ChunkReason.CALIBRATION:
            chosen.probe_scheduled()
            for stage, model in enumerate((STAGE_0, STAGE_1)):
                ms = model.predict_ms(cached, chunk) * (1 + noise * rng.standard_normal())
                chosen.add_sample(stage, ChunkSample(cached, chunk, float(ms)))
        chunks.append(chunk)
        cached += chunk
    chosen.finish_prefill()
    return chunks


@pytest.mark.parametrize("max_tokens", [1, 63, 64, 100, 2048, 3072, 5000, 8192, 262_144])
@pytest.mark.parametrize("alignment", [16, 64, 128])
def test_sweep_sizes(max_tokens: int, alignment: int) -> None:
    sizes = plan_sweep(max_tokens, alignment)
    assert 1 <= len(sizes) <= MAX_SWEEP_SIZES
    assert sizes[-1] == max_tokens
    assert list(sizes) == sorted(set(sizes))
    assert all(size > 0 and size % alignment == 0 for size in sizes[:-1])


def test_no_room_to_sweep_is_no_sweep() -> None:
    assert plan_sweep(0, 64) == ()


@pytest.mark.parametrize("budget", [3072, 5000, 8192])
@pytest.mark.parametrize("alignment", [64, 128, 528])
@pytest.mark.parametrize("min_chunk", [64, 1000, 2048])
def test_probe_sizes_are_positive_unique_and_aligned(
    budget: int, alignment: int, min_chunk: int
) -> None:
    large, small = plan_probes(budget, min_chunk, alignment)
    assert 0 < small < large <= budget
    assert small >= min_chunk
    assert small % alignment == large % alignment == 0
    assert small - alignment < max(budget // 4, min_chunk)


def test_no_two_probe_sizes_gives_up_at_once_and_names_the_numbers() -> None:
    assert plan_probes(4096, 4090, 64) == ()
    chosen = calibrator(min_chunk=4090)
    assert chosen.phase is CalibrationPhase.GIVEN_UP
    assert "4090" in chosen.reason
    assert "4096" in chosen.reason


@pytest.mark.parametrize("num_tokens", [16384, 5000, 2100])
def test_the_confirming_prompt_of_auto_has_halves_of_its_chunks_too(num_tokens: int) -> None:
    chosen = swept(
        make_policy=lambda models: ShortestTTFT(Pipeline(tuple(models)), 4096, 64),
        needs_shrink=False,
        min_chunk=64,
        probe_divisors=(8, 32),
        max_samples=90,
    )
    while chosen.phase is CalibrationPhase.PROBING:
        prefill_prompt(chosen, f"r{chosen._num_requests}")
    candidate = chosen._candidate
    assert isinstance(candidate, ShortestTTFT)
    plan = plan_chunks(candidate.pipeline, 0, num_tokens, 4096, 64).ends
    chunks = prefill_prompt(chosen, "confirming", num_tokens)
    ends = np.cumsum(chunks).tolist()
    assert ends[-1] == num_tokens
    assert all(end % 64 == 0 for end in ends[:-1])
    starts = dict(zip([0, *plan], plan, strict=False))
    halves = [end for end in ends if end not in plan]
    assert len(halves) == len(plan) // 2  # whole, half, half
    assert set(plan) <= set(ends)
    for start, end in starts.items():
        assert all(abs(half - (start + end) / 2) <= 64 for half in halves if start < half < end)


def test_probes_two_prompts_confirms_on_a_third_and_installs_a_model_per_stage() -> None:
    chosen = swept()
    assert chosen.phase is CalibrationPhase.PROBING
    first = prefill_prompt(chosen, "a")
    assert first[:4] == [4096, 1024, 4096, 1024]
    assert chosen.phase is CalibrationPhase.PROBING  # one short prompt may be a bad moment
    second = prefill_prompt(chosen, "bb")
    assert second[:4] == [1024, 4096, 1024, 4096]
    assert chosen.phase is CalibrationPhase.CONFIRMING
    third = prefill_prompt(chosen, "ccc")
    assert third[0] == 4096
    assert third[1:3] == sorted(third[1:3], reverse=True)  # sized by the fit
    assert chosen.phase is CalibrationPhase.INSTALLED
    for model, truth in zip(chosen.models, (STAGE_0, STAGE_1), strict=True):
        assert model.predict_ms(12288, 2048) == pytest.approx(
            truth.predict_ms(12288, 2048), rel=0.03
        )
    assert slowest_stage(chosen.models, 8192, 4096) == 1
    before, num_samples = list(chosen.models), len(chosen.samples[0])
    assert len(first) + len(second) < num_samples <= chosen.max_samples
    prefill_prompt(chosen, "dddd")  # nothing is sampled or refitted any more
    assert chosen.models == before
    assert len(chosen.samples[0]) == num_samples


def test_fit_that_its_own_prompt_contradicts_is_not_installed() -> None:
    """The probes looked fine, then the machine is another one: no model, bounded probes."""
    chosen = swept()
    prefill_prompt(chosen, "a")
    prefill_prompt(chosen, "bb")
    assert chosen.phase is CalibrationPhase.CONFIRMING
    for i in range(20):
        prefill_prompt(chosen, "c" * (i + 3), noise=0.6)
    assert chosen.phase is CalibrationPhase.GIVEN_UP
    assert len(chosen.samples[0]) <= chosen.max_samples


def test_a_small_first_chunk_finds_cold_caches_and_does_not_count() -> None:
    """Its time would be taken for a fixed cost of every chunk."""
    chosen = swept(probe_divisors=(8, 32), min_chunk=64)
    first_chunks = [prefill_prompt(chosen, "r" * i)[0] for i in range(1, 4)]
    assert chosen.phase is CalibrationPhase.INSTALLED
    assert first_chunks[1] == 512
    for samples in chosen.samples.values():
        starts = {sample.num_new for sample in samples if sample.num_cached == 0}
        assert starts == {4096}
        assert {128, 512} <= {sample.num_new for sample in samples}


@pytest.mark.parametrize("num_bad", [1, 3, 6])
def test_a_bad_moment_does_not_decide_for_good(num_bad: int) -> None:
    chosen = swept()
    for i in range(num_bad):
        prefill_prompt(chosen, f"bad {i}", noise=0.6)
    assert chosen.phase is CalibrationPhase.PROBING
    for i in range(6):
        prefill_prompt(chosen, f"good {i}")
    assert chosen.phase is CalibrationPhase.INSTALLED
    assert all(len(samples) <= chosen.max_samples for samples in chosen.samples.values())


def test_installs_with_two_chunks_a_prompt() -> None:
    """Few shapes per prompt: the probe order changes from request to request."""
    chosen = swept(budget=8192, min_chunk=4096)
    for i in range(4):
        prefill_prompt(chosen, "r" * (i + 1))
        if chosen.is_final:
            break
    assert chosen.phase is CalibrationPhase.INSTALLED


def test_short_prompts_keep_their_chunk_and_do_not_use_up_the_samples() -> None:
    """Case: only short prompts for a long time, then a long one."""
    chosen = swept()
    for i in range(200):
        assert prefill_prompt(chosen, f"short{i}", 3000) == [3000]
    assert chosen.phase is CalibrationPhase.PROBING
    for name in ("a", "bb", "ccc"):
        prefill_prompt(chosen, name)
    assert chosen.phase is CalibrationPhase.INSTALLED


def test_pure_noise_gives_up_after_a_bounded_number_of_probes() -> None:
    chosen = swept()
    rng = np.random.default_rng(0)
    for i in range(30):
        cached = 0
        while cached < 16384:
            prefill = Prefill(f"r{i}", cached, 16384 - cached)
            chosen.begin_step(Step([prefill]))
            chunk, reason = chosen.size(prefill, min(4096, prefill.num_remaining))
            if reason is ChunkReason.CALIBRATION:
                chosen.probe_scheduled()
                for stage in range(2):
                    chosen.add_sample(stage, ChunkSample(cached, chunk, float(rng.uniform(1, 500))))
            cached += chunk
        chosen.finish_prefill()
    assert chosen.phase is CalibrationPhase.GIVEN_UP
    assert "stage 0" in chosen.reason
    assert len(chosen.samples[0]) <= chosen.max_samples
    prefill = Prefill("later", 0, 16384)
    chosen.begin_step(Step([prefill]))
    assert chosen.size(prefill, 4096) == (4096, ChunkReason.FIXED)


def test_gives_up_when_timings_never_arrive() -> None:
    chosen = swept()
    for i in range(60):
        prefill = Prefill(f"r{i}", 0, 16384)
        for _ in range(5):
            chosen.begin_step(Step([prefill]))
            if chosen.size(prefill, 4096).reason is ChunkReason.CALIBRATION:
                chosen.probe_scheduled()
        chosen.finish_prefill()
    assert chosen.phase is CalibrationPhase.GIVEN_UP


def test_no_useful_shrink_keeps_fixed_chunks() -> None:
    """A context hardly longer than one chunk leaves nothing to equalise."""
    chosen = swept(max_model_len=4200)
    prefill_prompt(chosen, "a")
    prefill_prompt(chosen, "bb")
    assert chosen.phase is CalibrationPhase.GIVEN_UP
    assert "no useful shrink" in chosen.reason


def test_probes_only_a_sole_prefill() -> None:
    chosen = swept()
    one, other = Prefill("one", 0, 16384), Prefill("other", 0, 16384)
    chosen.begin_step(Step([one, other]))
    assert chosen.size(one, 4096) == (4096, ChunkReason.OTHER_PREFILLS)


def test_prompts_below_the_budget_calibrate_a_policy_that_may_split_them() -> None:
    """Case: max_num_batched_tokens is above all prompts that the server gets."""
    chosen = swept(budget=8192, probe_divisors=(8, 32), min_chunk=64, needs_shrink=False)
    assert prefill_prompt(chosen, "short", 4096) == [4096]
    assert prefill_prompt(swept(budget=8192), "equal-latency", 8000) == [8000]
    assert prefill_prompt(swept(budget=8192), "equal-latency", 10000)[0] == 8192
    for i in range(6):
        chunks = prefill_prompt(chosen, "r" * (i + 1), 8000)
        if chosen.is_final:
            break
        assert len(chunks) > 2
        assert max(chunks) <= 4032
    assert chosen.phase is CalibrationPhase.INSTALLED
    for model, truth in zip(chosen.models, (STAGE_0, STAGE_1), strict=True):
        whole = (0, 8000)
        assert model.predict_ms(*whole) == pytest.approx(truth.predict_ms(*whole), rel=0.05)


def test_runs_are_the_chunks_that_were_timed_on_all_stages_prompt_by_prompt() -> None:
    chosen = swept()
    for num_cached, num_new, stages in ((0, 64, 2), (64, 32, 2), (0, 128, 2), (128, 8, 1)):
        for stage in range(stages):
            sample = ChunkSample(num_cached, num_new, 10.0 + stage)
            chosen.add_sample(stage, sample, gap_ms=float(num_new))
    first, second = chosen.runs
    assert (first.new, second.new) == ((64, 32), (128,))
    assert first.latencies_ms == ((10.0, 11.0), (10.0, 11.0))
    assert first.gaps_ms == ((64.0, 64.0), (32.0, 32.0))
    chosen.add_sample(1, ChunkSample(136, 8, 10.0))  # that of stage 0 was lost
    assert chosen.runs == [first, second]


def test_dropped_probe_is_repeated() -> None:
    """The engine may not schedule a sized chunk (no KV blocks): the order doesn't advance."""
    chosen = swept()
    prefill = Prefill("r", 0, 16384)
    chosen.begin_step(Step([prefill]))
    assert chosen.size(prefill, 4096).num_tokens == 4096
    chosen.begin_step(Step([prefill]))
    assert chosen.size(prefill, 4096).num_tokens == 4096
    chosen.probe_scheduled()
    assert chosen.size(Prefill("r", 4096, 12288), 4096).num_tokens == 1024


def test_empty_sweep_gives_up() -> None:
    chosen = calibrator()
    chosen.add_sweep(0, [])
    assert chosen.phase is CalibrationPhase.GIVEN_UP
    assert "stage 0" in chosen.reason
    chosen.add_sweep(1, [(64, 1.0)])
    assert chosen.phase is CalibrationPhase.GIVEN_UP


def test_probing_ends_when_samples_are_full_and_waits_for_the_fit() -> None:
    """A million-token prompt isn't cut into probe sizes all along."""
    chosen = swept()
    sizes = []
    cached = 0
    for _ in range(100):
        prefill = Prefill("long", cached, 1_000_000 - cached)
        chosen.begin_step(Step([prefill]))
        chunk, reason = chosen.size(prefill, 4096)
        if reason is ChunkReason.CALIBRATION:
            chosen.probe_scheduled()
            for stage, model in enumerate((STAGE_0, STAGE_1)):
                ms = model.predict_ms(cached, chunk)
                chosen.add_sample(stage, ChunkSample(cached, chunk, ms))
        sizes.append(chunk)
        cached += chunk
    assert 1024 in sizes[:30]
    assert set(sizes[30:]) == {4096}


def test_does_not_probe_beside_many_decodes() -> None:
    """A batch with them is no sample: probing would slow prompts for nothing, for ever."""
    chosen = swept()
    prefill = Prefill("r", 0, 16384)
    chosen.begin_step(Step([prefill], num_decode_tokens=64))
    assert chosen.size(prefill, 4032) == (4032, ChunkReason.FIXED)
    chosen.begin_step(Step([prefill], num_decode_tokens=0))
    assert chosen.size(prefill, 4096).reason is ChunkReason.CALIBRATION


@pytest.mark.parametrize("max_samples", [6, 7, 8, 30])
def test_smallest_sample_limits_can_still_install(max_samples: int) -> None:
    chosen = swept(max_samples=max_samples)
    for i in range(6):
        prefill_prompt(chosen, "r" * (i + 1), noise=0.0)
    assert chosen.phase is CalibrationPhase.INSTALLED


@pytest.mark.parametrize(("max_error", "is_used"), [(0.07, False), (0.25, True)])
def test_a_noisy_machine_needs_a_larger_error_to_be_allowed(
    max_error: float, is_used: bool
) -> None:
    chosen = swept(max_samples=60, checks=FitChecks.with_error(max_error))
    for number in range(60):
        if not chosen.is_final:
            prefill_prompt(chosen, f"request {number}", noise=0.18)
    assert chosen.is_final
    assert (chosen.phase is CalibrationPhase.INSTALLED) is is_used
    if not is_used:
        assert "at most 7% and 25% allowed" in chosen.reason
