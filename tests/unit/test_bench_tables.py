"""What a comparison says: the best fixed size, ratios, and the files that keep them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isochunk.benchmark.run import (
    HEADER,
    Cell,
    Comparison,
    Measurement,
    make_profile,
    table_rows,
    to_markdown,
    write_results,
)
from tests.unit.fake_server import make_controller, run_prompt

FAST = [2.0, 3.0, 2.2, 4.0, 2.1]  # a machine that slows down now and then


def measured(policy: str, factor: float) -> Measurement:
    ttfts = [factor * ttft for ttft in FAST]
    return Measurement(policy, ttfts, [1000 / ttft for ttft in ttfts], [2.2 * factor] * len(ttfts))


COMPARISON = Comparison(
    Cell(16384, 1, is_variable=False),
    [measured("fixed:512", 1.5), measured("fixed:2048", 1.0), measured("auto", 0.9)],
)


def test_rows_compare_with_the_best_fixed_size() -> None:
    assert COMPARISON.best_fixed.policy == "fixed:2048"
    rows = {row[0]: row for row in table_rows(COMPARISON)}
    assert all(len(row) == len(HEADER) for row in rows.values())
    assert rows["fixed:2048 (best fixed)"][1:6] == ("2.200 s", "2.200 s", "+0.0%", "1.000", "1")
    assert rows["fixed:512"][4:6] == ("1.500", "1.500 (1.500–1.500)")
    assert rows["auto"][4:6] == ("0.900", "0.900 (0.900–0.900)")
    assert rows["auto"][-1] == "1.111"  # throughput


def test_files_keep_every_number(tmp_path: Path) -> None:
    write_results(tmp_path / "out", [COMPARISON], "a machine", "<html>page</html>")
    saved = json.loads((tmp_path / "out" / "bench.json").read_text("utf-8"))
    assert saved["description"] == "a machine"
    (result,) = saved["results"]
    assert result["best_fixed"] == "fixed:2048"
    assert [m["policy"] for m in result["measurements"]] == ["fixed:512", "fixed:2048", "auto"]
    assert result["measurements"][2]["ttfts_s"] == [0.9 * ttft for ttft in FAST]
    assert result["ttft_by_round"]["auto"]["median"] == 0.9
    markdown = (tmp_path / "out" / "bench.md").read_text("utf-8")
    assert markdown == to_markdown([COMPARISON], "a machine")
    assert "### 16384 tokens, concurrency 1" in markdown
    assert markdown.count("| auto |") == 1
    assert (tmp_path / "out" / "bench.html").read_text() == "<html>page</html>"


def test_variable_lengths_are_the_same_for_every_policy() -> None:
    cell = Cell(8000, 4, is_variable=True)
    lengths = cell.lengths(seed=1)
    assert lengths == cell.lengths(seed=1) != cell.lengths(seed=2)
    assert len(lengths) == 12
    assert all(1000 <= length <= 8000 for length in lengths)
    assert Cell(8000, 1, is_variable=False).lengths(seed=1) == [8000]
    assert str(cell) == "up to 8000 tokens, concurrency 4"


@pytest.mark.parametrize(("can_spare", "max_in_flight"), [(False, 0), (True, 0), (False, 3)])
def test_the_profile_keeps_the_batches_in_flight(can_spare: bool, max_in_flight: int) -> None:
    controller = make_controller(can_spare=can_spare, max_in_flight=max_in_flight)
    for i in range(9):
        run_prompt(controller, f"prompt{i}", 16384)
    engine: Any = SimpleNamespace(controller=controller, budget=controller.calibrator.budget)
    profile = make_profile(engine, "toy", "cpu")
    assert len(profile.stages) == 2
    assert profile.to_pipeline() == controller.pipeline
    assert (profile.spare_batch, profile.max_in_flight) == (can_spare, max_in_flight)
