"""``isochunk serve`` as a user starts it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isochunk.calibrate.state import read_state
from isochunk.client import Client
from isochunk.demo.prompts import random_prompt
from isochunk.demo.server import VllmServer, cpu_env
from isochunk.profile import load_profile

COMMON = ["--pipeline-parallel-size", "2", "--enforce-eager", "--dtype", "float32"]
COMMON += ["--max-model-len", "16384", "--max-num-batched-tokens", "1024"]


def isochunk(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "isochunk.cli", *args],
        env=cpu_env() | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_vllm_ascend_command_line_works_unchanged(toy: Path, tmp_path: Path) -> None:
    """Calibrated by `isochunk calibrate`, whose report has to agree with log and metrics."""
    section = {"enabled": True, "min_chunk": 128, "max_fit_chunk": 90}
    own = {"max_fit_error": 0.25}  # test machines may be busy
    config = {"scheduler_config": {"profiling_chunk_config": section}, "isochunk": own}
    log = tmp_path / "server.log"
    env = cpu_env()
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    env["VLLM_LOG_STATS_INTERVAL"] = "1"
    with VllmServer(toy, [*COMMON, "--additional-config", json.dumps(config)], log, env) as server:
        server.wait_until_healthy()
        client = Client(server.url, server.model)
        assert not client.is_model_installed()
        profile = tmp_path / "profile.json"
        args = ["--prompt-tokens", "6144", "--requests", "15", "--save", str(profile)]
        done = isochunk("calibrate", "--base-url", server.url, *args)
        assert done.returncode == 0, done.stdout + done.stderr
        assert client.is_model_installed()
        client.complete(random_prompt(6144, 99), max_tokens=4)
        metrics = client.metrics()
        assert 'isochunk_chunks_total{reason="model"}' in metrics
        assert "vllm:prompt_tokens_total" in metrics  # vLLM's own are still there
        text = log.read_text()
        assert text.count("latency model installed: stage 0 of 2") == 1
        assert "Dynamic chunking since last report:" in text
        # What was printed is what the engine logged, and what it exports.
        models = read_state(metrics).models
        assert len(models) == 2
        for stage, model in enumerate(models):
            (shown,) = re.findall(f"^stage {stage}: (.*) \\[", done.stdout, re.MULTILINE)
            (logged,) = re.findall(f"installed: stage {stage} of 2.*: (t\\(.*) \\[", text)
            assert shown == logged == str(model)
        assert "6144 tokens, TTFT" in done.stdout
        assert load_profile(profile).pipeline_parallel_size == 2
        # A second run finds it done.
        again = isochunk("calibrate", "--base-url", server.url, "--json")
        assert again.returncode == 0, again.stderr
        parsed = json.loads(again.stdout)
        assert parsed["outcome"] == "already_installed"
        assert parsed["requests"] == []
        assert [stage["coefficients"]["a"] for stage in parsed["stages"]] == [
            model.attention_ms for model in models
        ]


@pytest.mark.parametrize(
    ("flags", "env", "parts"),
    [
        (
            ["--enable-dynamic-chunking", "--dynamic-chunking-smooth-factor", "1.5"],
            {},
            ["--dynamic-chunking-smooth-factor='1.5'", "[0, 1]"],
        ),
        (
            ["--enable-dynamic-chunking"],
            {"ISOCHUNK_DYNAMIC_CHUNKING_SMOOTH_FACTOR": "nan"},
            ["ISOCHUNK_DYNAMIC_CHUNKING_SMOOTH_FACTOR='nan'", "[0, 1]"],
        ),
        (
            ["--enable-dynamic-chunking", "--scheduler-cls", "my.Scheduler"],
            {},
            ["scheduler_cls='my.Scheduler'", "isochunk.vllm.scheduler"],
        ),
    ],
)
def test_bad_settings_end_before_anything_is_loaded(
    toy: Path, flags: list[str], env: dict[str, str], parts: list[str]
) -> None:
    done = isochunk("serve", str(toy), *COMMON, *flags, **env)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in last
    assert "Loading" not in done.stdout + done.stderr


def test_missing_model_is_named() -> None:
    done = isochunk("serve", "/does/not/exist", "--enable-dynamic-chunking")
    assert done.returncode == 2
    assert "model='/does/not/exist' does not exist" in done.stderr


def test_help_shows_the_flags_of_both() -> None:
    done = isochunk("serve", "--help=all", PAGER="cat", COLUMNS="100", TERM="dumb")
    shown = done.stdout + done.stderr
    assert done.returncode == 0, os.linesep + shown
    assert "--enable-dynamic-chunking" in shown
    assert "--pipeline-parallel-size" in shown
