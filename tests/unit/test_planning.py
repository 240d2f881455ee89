"""Predictions, advice, profiles, samples, traces and the plan command."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from isochunk.latency import LatencyModel
from isochunk.makespan import Pipeline
from isochunk.pipeline import simulate
from isochunk.plan_cli import plan
from isochunk.plan_html import MAX_STEPS, pipeline_figure
from isochunk.planning import (
    BetterFixed,
    Load,
    Prediction,
    advise_partition,
    better_fixed,
    closed_loops,
    poisson_loads,
    predict,
    recommend_budget,
)
from isochunk.policies import FixedChunk
from isochunk.profile import Profile, ProfileError, load_profile, save_profile, stages_of
from isochunk.samples import SamplesError, fit_samples, read_samples
from isochunk.trace_export import chrome_trace
from isochunk.workload import ClosedLoop, Request

MODEL = LatencyModel(20.0, 0.0, 0.05, 7e-7)
PIPELINE = Pipeline((MODEL,) * 4)


def test_auto_is_the_best_row():
    loads = closed_loops([32768], [1, 4])
    rows = list(predict(PIPELINE, loads, 32768, 64))
    for load in loads:
        chosen = {r.name: r for r in rows if r.load is load}
        auto = chosen.pop("auto")
        assert "fixed 1024" in chosen
        assert "equal-latency" in chosen
        assert all(auto.ttft_ms < other.ttft_ms for other in chosen.values())
        assert all(auto.prompt_tokens_per_s > r.prompt_tokens_per_s for r in chosen.values())


def test_poisson_load_waits_the_longer_the_more_often_prompts_come():
    rows = list(predict(PIPELINE, poisson_loads([8192, 16384], [0.1, 3.0]), 8192, 64))
    seldom, often = (
        {r.name: r for r in rows if f" {rate} req" in r.load.title} for rate in (0.1, 3)
    )
    alone = {r.name: r for r in predict(PIPELINE, closed_loops([8192, 16384], [1]), 8192, 64)}
    for name in ("auto", "fixed 8192"):
        assert seldom[name].ttft_ms < often[name].ttft_ms < often[name].p99_ttft_ms
        assert seldom[name].ttft_ms < 1.2 * alone[name].ttft_ms  # mostly alone
    assert often["auto"].ttft_ms < min(often[f"fixed {size}"].ttft_ms for size in (1024, 8192))


def test_long_timelines_are_drawn_until_the_same_time():
    timelines = []
    for size in (128, 8192):
        load = closed_loops([MAX_STEPS * 300], [1])[0]
        timelines.append((f"{size}", simulate(PIPELINE, FixedChunk(), load.workload, size)))
    fine, coarse = (timeline.batches for _, timeline in timelines)
    assert len(fine) > MAX_STEPS > len(coarse)
    figure = pipeline_figure(timelines)
    bars = list(figure.data)
    assert [len(bar.x) for bar in bars[:4]] == [MAX_STEPS] * 4
    until_s = fine[MAX_STEPS].scheduled_ms / 1000
    shown = sum(batch.scheduled_ms / 1000 < until_s for batch in coarse)
    assert 0 < shown < len(coarse)
    assert [len(bar.x) for bar in bars[4:]] == [shown] * 4
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert all(f"the first {until_s:.1f} s shown" in title for title in titles)
    short = pipeline_figure(timelines[1:])
    assert [len(bar.x) for bar in short.data] == [len(coarse)] * 4
    assert "shown" not in short.layout.annotations[0].text


def recommended(pipeline: Pipeline, loads: list[Load], budget: int) -> int:
    rows = list(predict(pipeline, loads, budget, 64))
    return recommend_budget(pipeline, rows, budget, 64)


def test_recommended_budget_is_the_smallest_that_costs_nothing():
    alone = closed_loops([32768], [1])
    assert recommended(PIPELINE, alone, 32768) == 2048
    # One stage: the fewer chunks the better, but two cost less than 1 % more than one.
    assert recommended(Pipeline((MODEL,)), alone, 32768) == 16384
    assert recommended(PIPELINE, alone, 700) == 700


def test_recommended_budget_holds_for_every_load():
    """Under load a step may need more tokens than a prompt alone."""
    alone, busy = closed_loops([4096], [1]), poisson_loads([4096], [8.0])
    assert recommended(PIPELINE, alone, 4096) == 1024
    size = recommended(PIPELINE, [*alone, *busy], 4096)
    assert size > 1024
    rows = list(predict(PIPELINE, busy, 4096, 64))
    at_size = list(predict(PIPELINE, busy, size, 64))
    assert at_size[-1].ttft_ms <= 1.01 * rows[-1].ttft_ms


def test_a_fixed_size_is_recommended_where_it_is_predicted_ahead() -> None:
    """Of one that serves all loads, not each load's own."""
    load = closed_loops([4096], [1])[0]

    def rows(*ttfts: tuple[str, int, float]) -> list[Prediction]:
        return [Prediction(name, size, load, ttft, ttft, 1.0, 1) for name, size, ttft in ttfts]

    behind = rows(("fixed 1024", 1024, 90), ("fixed 2048", 2048, 95), ("auto", 2048, 100))
    ahead = rows(("fixed 1024", 1024, 150), ("fixed 2048", 2048, 105), ("auto", 2048, 100))
    assert better_fixed(behind) == BetterFixed(1024, pytest.approx(100 / 90))
    assert better_fixed(ahead) is None
    assert better_fixed([*behind, *ahead]) is None
    even = rows(("fixed 1024", 1024, 200), ("fixed 2048", 2048, 100), ("auto", 2048, 100))
    assert better_fixed([*behind, *even]) == BetterFixed(2048, pytest.approx((1 / 0.95) ** 0.5))


def scaled(factor: float, extra_ms: float = 0.0) -> LatencyModel:
    return LatencyModel(extra_ms, 0.0, 0.01 * factor, 1e-7 * factor)


def test_partition_gives_the_odd_layer_to_the_last_stage():
    advice = advise_partition([scaled(n) for n in (16, 15, 15, 15)], (16, 15, 15, 15), 8192, 4096)
    assert advice.advised == (15, 15, 15, 16)
    assert not advice.is_better


def test_partition_takes_layers_from_a_stage_with_an_lm_head():
    layer_ms = scaled(1).predict_ms(8192, 4096)
    stages = [scaled(15), scaled(15), scaled(15), scaled(16, 3 * layer_ms)]
    advice = advise_partition(stages, (15, 15, 15, 16), 8192, 4096)
    assert advice.advised == (16, 16, 16, 13)
    assert advice.is_better
    assert advice.slowest_ms == pytest.approx(19 * layer_ms)
    assert advice.advised_slowest_ms == pytest.approx(16 * layer_ms)


@pytest.mark.parametrize("layers", [(15, 15), (0, 1, 1, 1)])
def test_partition_with_wrong_layers_is_refused(layers):
    with pytest.raises(ValueError, match="one a stage"):
        advise_partition([MODEL] * 4, layers, 0, 1024)


def profile(**kwargs: object) -> Profile:
    values = {
        "model_name": "toy",
        "device": "cpu",
        "max_num_batched_tokens": 8192,
        "alignment": 64,
        "versions": {"vllm": "0.32.0"},
        "layers": (4, 4),
        "stages": stages_of([MODEL, LatencyModel(25.0, 0.001, 0.06, 8e-7)]),
    }
    return Profile(**(values | kwargs))


def test_profile_round_trip(tmp_path: Path):
    path = tmp_path / "profile.json"
    save_profile(profile(), path)
    loaded = load_profile(path)
    assert loaded == profile()
    assert loaded.to_pipeline().stages == (MODEL, LatencyModel(25.0, 0.001, 0.06, 8e-7))
    assert loaded.pipeline_parallel_size == 2
    assert loaded.to_pipeline().depth == 2
    assert not loaded.to_pipeline().may_spare


def test_a_profile_keeps_how_many_batches_the_engine_has_in_flight(tmp_path: Path):
    path = tmp_path / "profile.json"
    save_profile(profile(max_in_flight=3, spare_batch=True), path)
    pipeline = load_profile(path).to_pipeline()
    assert (pipeline.depth, pipeline.may_spare) == (3, True)
    # One of before these fields: what vLLM keeps.
    old = json.loads(path.read_text())
    del old["max_in_flight"], old["spare_batch"]
    path.write_text(json.dumps(old))
    assert (load_profile(path).to_pipeline().depth, load_profile(path).spare_batch) == (2, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alignment": 0}, "alignment: .*greater than or equal to 1"),
        ({"device": None}, "device: "),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"stages": []}, "stages: "),
        ({"layers": [1, 2, 3]}, "layers has 3 entries for 2 stages"),
        ({"format_version": 2}, "format_version: "),
        (
            {"stages": [{"fixed_ms": -1, "prefix_ms": 0, "token_ms": 1, "attention_ms": 0}]},
            "stages.0.fixed_ms: ",
        ),
        (
            {"stages": [{"fixed_ms": 0, "prefix_ms": 0, "token_ms": 0, "attention_ms": 0}]},
            "stages.0: .*all coefficients are 0",
        ),
    ],
)
def test_a_wrong_profile_names_file_and_field(tmp_path: Path, change, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(profile().model_dump_json()) | change))
    with pytest.raises(ProfileError, match=rf"profile\.json: .*{message}"):
        load_profile(path)


def test_unreadable_profiles_name_the_file(tmp_path: Path):
    with pytest.raises(ProfileError, match=r"none\.json: can't be read: No such file"):
        load_profile(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ProfileError, match=r"bad\.json: profile: Invalid JSON"):
        load_profile(tmp_path / "bad.json")
    with pytest.raises(ProfileError, match="can't be written"):
        save_profile(profile(), tmp_path / "no" / "dir.json")


def write_samples(path: Path, num_stages: int = 2) -> None:
    lines = ["stage,num_cached,num_new,latency_ms"]
    for stage in range(num_stages):
        for cached in range(0, 60_000, 8192):
            for new in (2048, 8192):
                lines.append(f"{stage},{cached},{new},{MODEL.predict_ms(cached, new)}")
    path.write_text("\n".join(lines))


def test_samples_are_fitted_by_stage(tmp_path: Path):
    path = tmp_path / "samples.csv"
    write_samples(path)
    first, second = fit_samples(path)
    assert first.model == second.model
    assert first.model is not None
    assert first.model.predict_ms(1000, 5000) == pytest.approx(MODEL.predict_ms(1000, 5000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage,num_cached\n", "column num_new, latency_ms is missing"),
        (
            "stage,num_new,num_cached,latency_ms,num_new\n0,1,2,3,4\n",
            "column num_new is there more than once",
        ),
        ("stage,num_cached,num_new,latency_ms\n0,0,0,5\n", r"csv:2: num_new='0'"),
        ("stage,num_cached,num_new,latency_ms\n0,0,1,nan\n", r"csv:2: latency_ms='nan'"),
        (
            "stage,num_cached,num_new,latency_ms\n0,0,1,1e300\n",
            r"csv:2: latency_ms='1e300' is not a number >= 0 and <= 1e\+08",
        ),
        ("stage,num_cached,num_new,latency_ms\n0,0,1.5,3\n", "num_new='1.5' is not a whole number"),
        ("stage,num_cached,num_new,latency_ms\n1,0,1,5\n", r"stage=\[1\] must be numbered"),
        ("stage,num_cached,num_new,latency_ms\n", r"stage=\[\] must be numbered"),
    ],
)
def test_wrong_samples_name_line_and_field(tmp_path: Path, text, message):
    path = tmp_path / "samples.csv"
    path.write_text(text)
    with pytest.raises(SamplesError, match=message):
        read_samples(path)


def test_refused_fits_say_why(tmp_path: Path):
    path = tmp_path / "samples.csv"
    path.write_text("stage,num_cached,num_new,latency_ms\n0,0,100,5\n")
    with pytest.raises(SamplesError, match="stage 0: too few samples"):
        fit_samples(path)


def test_chrome_trace_has_every_batch_on_every_stage():
    timeline = simulate(PIPELINE, FixedChunk(), ClosedLoop([Request(5000)], 1), 2048)
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert len(slices) == 3 * 4
    last = max(slices, key=lambda e: e["ts"] + e["dur"])
    assert last["tid"] == 3
    assert last["ts"] + last["dur"] == pytest.approx(1000 * timeline.makespan_ms)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == [f"stage {i}" for i in range(4)]


def invoke(*args: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, args)
    return result.exit_code, result.output


def test_plan_command_from_rough_numbers_writes_pictures(tmp_path: Path):
    trace, html = tmp_path / "t.json", tmp_path / "t.html"
    code, output = invoke(
        "--stage-ms-per-1k", "50", "--pp", "4", "--prompt-tokens", "16384",
        "--layers", "15,15,15,16", "--trace", str(trace), "--html", str(html),
    )  # fmt: skip
    assert code == 0, output
    assert "16384 tokens, concurrency 1" in output
    assert "Recommended: --max-num-batched-tokens" in output
    assert "Layer partition:" in output
    assert json.loads(trace.read_text())["traceEvents"]
    text = html.read_text()
    assert "stages idle" in text
    assert 'src="http' not in text  # self-contained
    assert text.index("fixed ") < text.index("auto: ")


def test_plan_command_from_profile_and_samples(tmp_path: Path):
    save_profile(profile(), tmp_path / "p.json")
    write_samples(tmp_path / "s.csv")
    for source in (("--profile", "p.json"), ("--fit-samples", "s.csv")):
        code, output = invoke(source[0], str(tmp_path / source[1]), "--prompt-tokens", "8192")
        assert code == 0, output
        assert "auto" in output


def test_plan_command_for_random_and_recorded_arrivals(tmp_path: Path):
    path = tmp_path / "day.csv"
    path.write_text("timestamp,prompt_tokens,cached_tokens\n0,9000,0\n0.2,30000,16384\n9,500,0\n")
    html, trace = tmp_path / "t.html", tmp_path / "t.json"
    code, output = invoke(
        "--stage-ms-per-1k", "50", "--arrivals", str(path), "--output-tokens", "3",
        "--html", str(html), "--trace", str(trace),
    )  # fmt: skip
    assert code == 0, output
    assert "requests of day.csv: 3" in output
    assert "p99 TTFT" in output
    assert "stages idle" in html.read_text()
    assert "30000" in trace.read_text()  # 13616 tokens after 16384 cached ones end there
    code, output = invoke(
        "--stage-ms-per-1k", "50", "--rate", "0.5", "--rate", "2", "--prompt-tokens", "4096"
    )
    assert code == 0, output
    assert "200 requests of 4096 tokens, 0.5 requests/s: 2048 tok/s come in" in output
    assert "200 requests of 4096 tokens, 2 requests/s: 8192 tok/s come in" in output
    assert "concurrency" not in output


def test_plan_command_says_where_it_cannot_write(tmp_path: Path):
    code, output = invoke(
        "--stage-ms-per-1k",
        "5",
        "--prompt-tokens",
        "999",
        "--html",
        str(tmp_path / "no" / "t.html"),
    )
    assert code == 1
    assert "can't be written" in output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "exactly one of --profile, --fit-samples and --stage-ms-per-1k"),
        (("--profile", "/nonexistent.json"), "/nonexistent.json: can't be read"),
        (("--stage-ms-per-1k", "5", "--stage-ms-per-1k", "5", "--pp", "3"), "given 2 times"),
        (("--stage-ms-per-1k", "5", "--layers", "1,x"), "--layers='1,x'"),
        (("--stage-ms-per-1k", "5", "--layers", "1,1,1"), "must be 2 numbers"),
        (("--stage-ms-per-1k", "-5"), "--stage-ms-per-1k=-5.0 must be"),
        (("--stage-ms-per-1k", "nan"), "--stage-ms-per-1k=nan must be"),
        (("--stage-ms-per-1k", "inf"), "--stage-ms-per-1k=inf must be"),
        (("--stage-ms-per-1k", "5", "--prompt-tokens", "10000001"), "--prompt-tokens"),
        (("--stage-ms-per-1k", "5", "--rate", "0"), "--rate=0.0 must be 0.0001 to 10000"),
        (("--stage-ms-per-1k", "5", "--rate", "nan"), "--rate=nan must be"),
        (("--stage-ms-per-1k", "5", "--layers", ""), "--layers=''"),
        (("--stage-ms-per-1k", "5", "--arrivals", "/no.csv"), "/no.csv: can't be read"),
        (
            ("--stage-ms-per-1k", "5", "--arrivals", "/no.csv", "--rate", "2"),
            "leave out --prompt-tokens",
        ),
    ],
)
def test_plan_command_names_what_is_wrong(args, message):
    code, output = invoke(*args)
    assert code == 2
    assert message in output
