"""``isochunk bench`` on the real engine, as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

POLICIES = ["fixed:512", "equal-latency", "auto"]


def bench(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # The command sets up its engine by itself, as in a fresh shell.
    env = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_CPU")}
    return subprocess.run(
        [sys.executable, "-m", "isochunk.cli", "bench", *args],
        cwd=cwd, env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_compares_policies_and_writes_what_it_found(toy: Path, tmp_path: Path) -> None:
    result = bench(
        str(toy), "--prompt-tokens", "6000", "--max-num-batched-tokens", "2048", "--fixed", "512",
        "--rounds", "2", "--concurrency", "1", "--concurrency", "2", "--max-fit-error", "0.4",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    out = tmp_path / "bench-out"
    saved = json.loads((out / "bench.json").read_text())
    assert [cell["cell"]["concurrency"] for cell in saved["results"]] == [1, 2]
    for cell in saved["results"]:
        assert [m["policy"] for m in cell["measurements"]] == POLICIES
        for measurement in cell["measurements"]:
            assert len(measurement["ttfts_s"]) == 2
            assert all(0 < ttft < 60 for ttft in measurement["ttfts_s"])
            assert all(0 < ttft < 60 for ttft in measurement["predicted_ttfts_s"])
    for concurrency in (1, 2):
        assert f"6000 tokens, concurrency {concurrency}" in result.stdout
    assert "| auto |" in (out / "bench.md").read_text()
    assert "<html" in (out / "bench.html").read_text()
    assert len(json.loads((out / "profile.json").read_text())["stages"]) == 2


def test_an_engine_without_dynamic_chunking_ends_it_with_the_reason(
    toy: Path, tmp_path: Path
) -> None:
    result = bench(
        str(toy), "--max-num-batched-tokens", "64", "--fixed", "64", "--prompt-tokens", "600",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    assert "isochunk bench: dynamic chunking is off on this engine" in result.stdout
    assert "no two probe sizes between the minimum chunk" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fixed", "4096", "--max-num-batched-tokens", "2048"], "--fixed 4096 exceeds"),
        (["--prompt-tokens", "4096"], "--prompt-tokens 4096 isn't enough"),
        (["--max-model-len", "16384"], "--max-model-len 16384 must exceed"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    args: list[str], message: str, tmp_path: Path
) -> None:
    result = bench("toy", *args, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
