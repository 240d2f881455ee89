"""The controller as an engine adapter uses it: steps, tags, answers, installation."""

import json
import logging
from pathlib import Path

import pytest

from isochunk.config import DynamicChunkingConfig
from isochunk.controller import ChunkController
from isochunk.latency import LatencyModel
from isochunk.policies import ChunkReason, EqualLatency, FixedChunk, Prefill, Step
from isochunk.shortest_ttft import ShortestTTFT
from isochunk.timings import Timing, read_trace

STAGES = (LatencyModel(10.0, 0.001, 0.06, 2e-5), LatencyModel(12.0, 0.001, 0.07, 2.4e-5))


def controller(**changes: object) -> ChunkController:
    values = {"enabled": True, "policy": "equal-latency", "min_chunk_size": 512} | changes
    settings = DynamicChunkingConfig(**values)
    made = ChunkController(
        settings, max_num_batched_tokens=4096, alignment=64, num_stages=2, max_model_len=32768
    )
    # Two TP ranks a stage: the slower one counts.
    made.add_sweep(
        [
            (stage, [(x, (8 + model.token_ms * x) * factor) for x in range(170, 4097, 170)])
            for stage, model in enumerate(STAGES)
            for factor in (1.0, 0.5)
        ]
    )
    return made


def run_prompt(
    made: ChunkController, request_id: str, num_tokens: int = 16384, decodes: int = 0
) -> list[int]:
    """A sole prompt, ``decodes`` other requests in each step; returns the chunk sizes."""
    cached, chunks = 0, []
    while cached < num_tokens:
        prefill = Prefill(request_id, cached, num_tokens - cached)
        made.begin_step(Step([prefill], decodes))
        chunk = made.size(prefill, min(4096 - decodes, prefill.num_remaining))
        scheduled = {request_id: chunk} | {f"decode{i}": 1 for i in range(decodes)}
        tag = made.end_step(scheduled)
        if tag is not None:
            made.ledger.complete(tag)
            times = [model.predict_ms(cached, chunk) for model in STAGES]
            answers = [(s, [Timing(tag, 0.0, ms)]) for s, ms in enumerate(times)]
            answers += [(s, [Timing(tag, 0.0, ms * 0.9)]) for s, ms in enumerate(times)]
            made.settle(made.ledger.ask(), answers)
        chunks.append(chunk)
        cached += chunk
    return chunks


def test_calibrates_installs_once_and_stops_timing(caplog: pytest.LogCaptureFixture) -> None:
    made = controller(smooth_factor=1.0)
    with caplog.at_level(logging.INFO, logger="isochunk"):
        run_prompt(made, "a")
        assert made.needs_timing
        run_prompt(made, "b")
        run_prompt(made, "b2")
        assert not made.needs_timing
        sampled = made.counts[ChunkReason.CALIBRATION]
        before = made.counts[ChunkReason.MODEL]
        chunks = run_prompt(made, "c")
    assert isinstance(made.policy, EqualLatency)
    assert made.policy.model == made.models[1]  # the slowest stage
    assert chunks[0] == 4096
    assert chunks[1] < 2500
    installed = [r for r in caplog.records if "latency model installed" in r.message]
    assert len(installed) == 2  # one line per stage, once
    assert "stage 1 of 2 (the slowest), policy equal-latency" in caplog.text
    assert made.counts[ChunkReason.MODEL] == before + len(chunks)
    assert made.counts[ChunkReason.CALIBRATION] == sampled == len(made.calibrator.samples[0])


def test_batches_with_other_requests_are_no_samples() -> None:
    made = controller()
    for i in range(5):
        run_prompt(made, f"r{i}", decodes=64)
    assert made.is_calibrating
    assert not made.calibrator.samples
    assert not made.counts[ChunkReason.CALIBRATION]  # nor are they probed


def test_a_few_decodes_beside_a_chunk_do_not_stop_the_calibration() -> None:
    made = controller()
    for i in range(4):
        run_prompt(made, f"r{i}", decodes=3)
    assert made.models


def test_only_what_was_scheduled_counts() -> None:
    made = controller()
    prefill = Prefill("r", 0, 16384)
    made.begin_step(Step([prefill]))
    made.size(prefill, 4096)
    assert made.end_step({"decode": 1}) is None  # the chunk was dropped: no KV blocks
    assert not made.counts
    made.begin_step(Step([prefill]))
    made.size(prefill, 4096)
    assert made.end_step({"r": 2048}) is not None  # cut by the engine
    assert made.counts == {ChunkReason.CALIBRATION: 1}


def test_forward_without_timing_settles_its_tag() -> None:
    made = controller()
    prefill = Prefill("r", 0, 16384)
    made.begin_step(Step([prefill]))
    made.size(prefill, 4096)
    made.ledger.complete(made.end_step({"r": 4096}))
    made.settle(made.ledger.ask(), [(0, []), (1, [])])
    assert not made.ledger.outstanding
    assert not made.calibrator.samples


def test_override_counts_as_fixed_and_is_not_sampled() -> None:
    made = controller()
    prefill = Prefill("r", 0, 16384)
    made.begin_step(Step([prefill]))
    assert made.size(prefill, 4096, FixedChunk(1000)) == 1000
    assert made.end_step({"r": 1000}) is None
    assert made.counts == {ChunkReason.FIXED: 1}


def test_giving_up_warns_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    settings = DynamicChunkingConfig(enabled=True, policy="equal-latency", min_chunk_size=512)
    made = ChunkController(
        settings, max_num_batched_tokens=4096, alignment=64, num_stages=2, max_model_len=32768
    )
    with caplog.at_level(logging.INFO, logger="isochunk"):
        made.add_sweep([(0, []), (1, [])])
        for i in range(3):
            run_prompt(made, f"r{i}")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "keeps fixed chunks: the startup sweep of stage 0" in caplog.text
    assert made.is_fixed_for_good
    assert run_prompt(made, "x") == [4096] * 4


def test_trace_has_a_line_per_batch_and_stage(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    made = controller(trace_file=str(path))
    for name in ("a", "b", "b2", "c"):
        run_prompt(made, name)
    assert made.needs_timing  # for the trace, although the model is installed
    lines = read_trace(path)
    last = [line for line in lines if line["pieces"][0]["request_id"] == "c"]
    assert {line["stage"] for line in last} == {0, 1}
    assert sum(line["pieces"][0]["num_new"] for line in last if line["stage"] == 0) == 16384
    for line in last:
        assert line["predicted_ms"] == pytest.approx(line["latency_ms"], rel=0.05)
    assert json.loads(path.read_text().splitlines()[0])["predicted_ms"] is None
    assert [line["stage"] for line in read_trace(path, "model")] == [0, 1]
    assert read_trace(path, "model")[1]["token_ms"] == made.models[1].token_ms


def test_auto_policy_plans_with_the_engine_overhead_and_has_no_minimum_chunk() -> None:
    made = controller(policy="auto")
    for name in ("a", "b", "b2", "c", "d"):
        run_prompt(made, name)
    assert isinstance(made.policy, ShortestTTFT)
    assert made.calibrator.min_chunk == made.alignment
    assert made.pipeline.stages == tuple(made.models)  # no gaps were reported
    chunks = run_prompt(made, "e")
    assert sum(chunks) == 16384
    assert max(chunks) < 4096  # shorter chunks fill the pipeline sooner


def test_zero_tokens_of_a_policy_count_nowhere() -> None:
    """ "Not in this step" is a valid answer while other prefills fill the step."""
    made = controller(policy="auto")
    for name in ("a", "b", "b2", "c", "d"):
        run_prompt(made, name)
    before = made.counts.total()
    crowd = [Prefill(f"r{i}", 0, 16384) for i in range(12)]
    made.begin_step(Step(crowd, 0, len(crowd)))
    sizes = {p.request_id: made.size(p, 4096) for p in crowd}
    assert sizes["r0"] > 0
    assert 0 in sizes.values()
    made.end_step({name: size for name, size in sizes.items() if size})
    assert made.counts.total() - before == sum(size > 0 for size in sizes.values())


def test_fixed_policy_never_calibrates() -> None:
    made = controller(policy="fixed")
    assert made.is_fixed_for_good
    assert run_prompt(made, "x") == [4096] * 4
    assert not made.needs_timing


def test_completions_correct_an_installed_model() -> None:
    """The machine's attention has become slower since the calibration."""
    now = 0.0
    settings = DynamicChunkingConfig(enabled=True)
    made = ChunkController(
        settings,
        max_num_batched_tokens=4096,
        alignment=64,
        num_stages=2,
        max_model_len=32768,
        clock=lambda: now,
    )
    made.add_sweep(
        [
            (s, [(x, 8 + m.token_ms * x) for x in range(170, 4097, 170)])
            for s, m in enumerate(STAGES)
        ]
    )
    for i in range(4):
        run_prompt(made, f"r{i}")
    assert isinstance(made.policy, ShortestTTFT)
    while made.num_in_flight:  # run_prompt never told of them
        made.batch_done(None)
    free = [0.0, 0.0]
    for name in ("a", "b", "c"):
        cached, in_flight = 0, []
        while cached < 16384 or in_flight:
            if cached < 16384 and len(in_flight) < 2:
                prefill = Prefill(name, cached, 16384 - cached)
                made.begin_step(Step([prefill]))
                chunk = made.size(prefill, min(4096, prefill.num_remaining))
                made.end_step({name: chunk, "decode": 1})
                ready = now
                for stage, m in enumerate(STAGES):
                    slower = LatencyModel(m.fixed_ms, m.prefix_ms, m.token_ms, 1.3 * m.attention_ms)
                    ready = max(ready, free[stage]) + slower.predict_ms(cached, chunk) / 1e3
                    free[stage] = ready
                in_flight.append(ready)
                cached += chunk
            else:
                now = in_flight.pop(0)
                made.batch_done(None)
    policy = made.policy
    policy.feedback.learn()
    assert policy.feedback.pipeline is not policy.feedback.fitted
    assert 1.2 < policy.feedback.factors[3] / policy.feedback.factors[2] < 1.45
