"""``isochunk calibrate`` against a server over TCP, for each way it can end."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from isochunk import metrics
from isochunk.cli import app
from isochunk.profile import load_profile
from tests.unit.fake_server import FakeServer, clear_metrics, make_controller, run_prompt, serving

Start = Callable[..., FakeServer]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts fake servers, one a test."""
    clear_metrics()
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(serving(FakeServer(**changes)))


def calibrate(fake: FakeServer | str, *args: str) -> Result:
    url = fake if isinstance(fake, str) else fake.url
    return CliRunner().invoke(app, ["calibrate", "--base-url", url, *args])


def calibrated(result: Result, status: int) -> Result:
    assert result.exit_code == status, result.output
    return result


def error(result: Result) -> str:
    """The message of an unusable server or option; nothing else is printed."""
    assert result.exit_code == 2, result.output
    message = result.stderr.strip()
    assert message.startswith("isochunk calibrate: ")
    assert "Traceback" not in result.output
    return message


def test_stops_as_soon_as_the_model_is_installed(start: Start) -> None:
    fake = start(controller=make_controller())
    shown = calibrated(calibrate(fake, "--prompt-tokens", "16384", "--requests", "9"), 0).stdout
    assert fake.controller is not None
    models = fake.controller.models
    assert len(models) == 2
    assert 2 <= len(fake.prompts) < 9
    assert f"installed after {len(fake.prompts)} requests (policy auto)" in shown
    for stage, report in enumerate(fake.controller.calibrator.reports):
        assert f"stage {stage}: {models[stage]} [{report.num_samples} samples" in shown
        assert f"a ± {report.standard_errors['attention_ms']:.2g}" in shown
    assert shown.count("16384 tokens, TTFT") == len(fake.prompts)


def test_prompts_share_no_kv_block_and_hold_ordinary_tokens(start: Start) -> None:
    fake = start(controller=make_controller())
    calibrated(calibrate(fake, "--prompt-tokens", "8192"), 0)
    assert {len(prompt) for prompt in fake.prompts} == {8192}
    assert len(fake.prompts) > 1
    assert len({prompt[0] for prompt in fake.prompts}) == len(fake.prompts)
    assert all(chr(token).isalnum() or token == 32 for p in fake.prompts for token in p)
    assert len(set(fake.prompts[0])) > 50
    # Nor do those of the next run.
    again = start(controller=make_controller())
    calibrate(again, "--prompt-tokens", "8192")
    assert again.prompts
    assert not {tuple(p[:16]) for p in fake.prompts} & {tuple(p[:16]) for p in again.prompts}


def test_json_has_the_numbers_of_the_metrics(start: Start) -> None:
    fake = start(controller=make_controller())
    result = calibrated(calibrate(fake, "--json", "--prompt-tokens", "16384"), 0)
    parsed = json.loads(result.stdout)
    assert fake.controller is not None
    assert parsed["outcome"] == "installed"
    assert parsed["model"] == "toy"
    assert len(parsed["requests"]) == len(fake.prompts)
    overhead = fake.controller.step_overhead
    assert overhead.fixed_ms + overhead.token_ms > 0
    assert parsed["step_overhead"] == {"c": overhead.fixed_ms, "b": overhead.token_ms}
    for stage, model in enumerate(fake.controller.models):
        assert parsed["stages"][stage]["coefficients"] == {
            "c": model.fixed_ms,
            "gamma": model.prefix_ms,
            "b": model.token_ms,
            "a": model.attention_ms,
        }
        report = fake.controller.calibrator.reports[stage]
        assert parsed["stages"][stage]["checks"]["prediction_error"] == report.prediction_error
    assert "request 1: 16384 tokens" in result.stderr


def test_installed_already_sends_nothing(start: Start) -> None:
    made = make_controller()
    for i in range(9):
        run_prompt(made, f"before{i}", 16384)
    assert made.models
    fake = start(controller=made)
    shown = calibrated(calibrate(fake), 0).stdout
    assert "already; nothing was sent" in shown
    assert f"stage 1: {made.models[1]} [" in shown
    assert not fake.prompts


@pytest.mark.parametrize(("can_spare", "max_in_flight"), [(False, 0), (True, 0), (False, 3)])
def test_saves_a_profile_that_plan_accepts(
    start: Start, tmp_path: Path, can_spare: bool, max_in_flight: int
) -> None:
    fake = start(controller=make_controller(can_spare=can_spare, max_in_flight=max_in_flight))
    path = tmp_path / "profile.json"
    shown = calibrated(calibrate(f"{fake.url}/v1/", "--save", str(path)), 0).stdout
    assert f"Wrote {path}" in shown
    profile = load_profile(path)
    assert fake.controller is not None
    assert profile.to_pipeline() == fake.controller.pipeline  # with the overhead of a step
    assert (profile.spare_batch, profile.max_in_flight) == (can_spare, max_in_flight)
    assert profile.model_dump(include={"model_name", "device", "alignment"}) == {
        "model_name": "toy",
        "device": "cpu",
        "alignment": 64,
    }
    assert profile.max_num_batched_tokens == 4096
    assert profile.versions["vllm"] == "0.32.0"
    args = ["plan", "--profile", str(path), "--prompt-tokens", "16384"]
    planned = CliRunner().invoke(app, args)
    assert planned.exit_code == 0, planned.output
    assert "auto" in planned.stdout


def test_given_up_on_the_way_prints_the_reason(start: Start, tmp_path: Path) -> None:
    fake = start(controller=make_controller(max_calibration_samples=12), noise=0.8)
    path = tmp_path / "profile.json"
    result = calibrated(calibrate(fake, "--requests", "9", "--save", str(path)), 1)
    assert fake.controller is not None
    reason = fake.controller.calibrator.reason
    assert reason
    assert f"given up: {reason}" in result.stderr
    assert "stays fixed" in result.stdout or "stay fixed" in result.stdout
    assert 0 < len(fake.prompts) < 9
    assert not path.exists()


def test_given_up_before_sends_nothing(start: Start) -> None:
    fake = start(controller=make_controller(policy="fixed"))
    result = calibrated(calibrate(fake), 1)
    assert "given up: policy=fixed asks for them" in result.stderr
    assert not fake.prompts


def test_too_few_requests(start: Start) -> None:
    fake = start(controller=make_controller())
    args = ("--requests", "1", "--prompt-tokens", "16384", "--json")
    result = calibrated(calibrate(fake, *args), 1)
    parsed = json.loads(result.stdout)
    assert parsed["outcome"] == "not_installed"
    assert parsed["phase"] in ("probing", "confirming")
    assert len(fake.prompts) == 1
    assert "raise --requests" in result.stderr


def test_a_fault_on_the_way_ends_it(start: Start) -> None:
    fake = start(controller=make_controller())

    def fail() -> None:
        metrics.export_off("it failed")

    fake.exporter.export = fail  # type: ignore[method-assign]
    result = calibrated(calibrate(fake), 1)
    assert "given up: it failed" in result.stderr
    assert len(fake.prompts) == 1


def test_off_names_the_servers_reason(start: Start) -> None:
    metrics.export_off("pipeline_parallel_size=1 has no pipeline to keep full; it needs > 1")
    message = error(calibrate(start()))
    assert "--base-url: dynamic chunking is off on this server" in message
    assert "pipeline_parallel_size=1 has no pipeline to keep full; it needs > 1" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        # One process: what its engine exports can't show.
        ('python_info{version="3"} 1\nvllm:x_total 1\n', "PROMETHEUS_MULTIPROC_DIR"),
        ('python_info{version="3"} 1\nisochunk_model_installed 0\n', "PROMETHEUS_MULTIPROC_DIR"),
        ("", "PROMETHEUS_MULTIPROC_DIR"),
        # Several: there is nothing to show.
        ("vllm:x_total 1\n", "--enable-dynamic-chunking"),
        ("isochunk_model_installed 0\n", "--enable-dynamic-chunking"),
        ("<html>hello</html>\n", "Prometheus"),
    ],
)
def test_metrics_without_a_calibration(start: Start, text: str, part: str) -> None:
    fake = start(metrics_text=text)
    message = error(calibrate(fake))
    assert "--base-url: " in message
    assert part in message


def test_api_key(start: Start) -> None:
    fake = start(controller=make_controller(), api_key="secret")
    for args in ((), ("--api-key", "wrong")):
        message = error(calibrate(fake, *args))
        assert "--api-key" in message
        assert "401" in message
        assert "Unauthorized" in message
    calibrated(calibrate(fake, "--api-key", "secret"), 0)
    assert {len(prompt) for prompt in fake.prompts} == {32768}  # by default what fits


@pytest.mark.parametrize(
    ("policy", "num_tokens", "bound"),
    [
        ("auto", "32769", "half of max_num_batched_tokens (4096)"),
        ("auto", "2048", "half of max_num_batched_tokens (4096)"),
        ("equal-latency", "4096", "above max_num_batched_tokens (4096)"),
    ],
)
def test_prompt_length_out_of_range(start: Start, policy: str, num_tokens: str, bound: str) -> None:
    fake = start(controller=make_controller(policy=policy, min_chunk_size=512))
    message = error(calibrate(fake, "--prompt-tokens", num_tokens))
    assert f"--prompt-tokens={num_tokens}" in message
    assert bound in message
    assert "max_model_len - 1 (32768)" in message
    assert not fake.prompts


def test_auto_is_calibrated_by_prompts_that_fit_into_one_chunk(start: Start) -> None:
    fake = start(controller=make_controller())
    calibrated(calibrate(fake, "--prompt-tokens", "4000", "--requests", "12"), 0)
    assert {len(prompt) for prompt in fake.prompts} == {4000}


def test_refused_prompt_shows_what_the_server_says(start: Start) -> None:
    refuse = "The decoder prompt (length 16384) is longer than the maximum model length of 8192."
    fake = start(controller=make_controller(), max_model_len=None, refuse=refuse)
    message = error(calibrate(fake, "--prompt-tokens", "16384"))
    assert "--prompt-tokens" in message
    assert refuse in message


def test_unknown_model_lists_the_served_ones(start: Start) -> None:
    message = error(calibrate(start(controller=make_controller()), "--model", "other"))
    assert "--model='other' isn't served here; served are: toy" in message


def test_connection_cut_on_the_way(start: Start) -> None:
    fake = start(controller=make_controller(), break_at=2)
    result = calibrate(fake, "--prompt-tokens", "16384")
    assert "--base-url: " in error(result)
    assert "/v1/completions: no answer: peer closed" in result.stderr
    assert len(fake.prompts) == 2


def test_slow_answer(start: Start) -> None:
    fake = start(controller=make_controller(), hang_s=20)
    message = error(calibrate(fake, "--timeout", "1"))
    assert "--timeout: " in message
    assert "/v1/completions: no answer" in message


def test_error_after_the_status(start: Start) -> None:
    fake = start(controller=make_controller(), fault="EngineCore encountered an issue.")
    message = error(calibrate(fake))
    assert "/v1/completions: EngineCore encountered an issue." in message


def test_unreachable(start: Start) -> None:
    with serving(FakeServer()) as gone:
        pass
    message = error(calibrate(gone))
    assert f"--base-url: {gone.url}/v1/models: no answer: " in message


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "", "http://h:port"])
def test_bad_url(url: str) -> None:
    assert f"--base-url={url!r} is not a URL such as http" in error(calibrate(url))


def test_another_kind_of_server(start: Start) -> None:
    fake = start()
    assert "status 404" in error(calibrate(f"{fake.url}/elsewhere"))
    anything: Any = CliRunner().invoke(app, ["calibrate"])
    assert anything.exit_code == 2
