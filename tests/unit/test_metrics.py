"""The metrics as another process reads them, by way of PROMETHEUS_MULTIPROC_DIR."""

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from isochunk.calibrate.state import read_state
from tests.unit.fake_server import make_controller, run_prompt

# An engine process (data-parallel rank) that has run some prompts.
RANK = """
import sys
from isochunk import metrics
from tests.unit.fake_server import make_controller, run_prompt
made = make_controller()
exporter = metrics.CalibrationExporter(made, "cpu", 2)
exporter.export()
for i in range(int(sys.argv[1])):
    run_prompt(made, f"r{i}", 16384)
    exporter.export()
    exporter.export()
"""


def run_rank(directory: Path, num_prompts: int) -> None:
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", RANK, str(num_prompts)], env=env, check=True)


def scrape(directory: Path) -> str:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(directory))
    return generate_latest(registry).decode()


def test_an_engine_process_shows_all_of_its_calibration(tmp_path: Path) -> None:
    run_rank(tmp_path, 9)
    text = scrape(tmp_path)
    made = make_controller()
    for i in range(9):
        run_prompt(made, f"r{i}", 16384)
    state = read_state(text)
    assert state.models == tuple(made.models)
    assert len(state.models) == 2
    assert state.overhead == made.step_overhead
    assert state.engine["tensor_parallel_size"] == "2"
    assert state.engine["max_num_batched_tokens"] == "4096"
    attention = made.models[1].attention_ms
    assert f'isochunk_latency_model{{coefficient="a",stage="1"}} {attention!r}\n' in text
    assert "isochunk_model_installed 1.0\n" in text
    assert 'isochunk_calibration{phase="installed"} 1.0\n' in text
    assert 'isochunk_calibration{phase="probing"} 0.0\n' in text
    assert 'isochunk_calibration{phase="given_up"} 0.0\n' in text


def test_not_done_before_every_data_parallel_rank_is(tmp_path: Path) -> None:
    run_rank(tmp_path, 9)
    assert read_state(scrape(tmp_path)).is_final
    run_rank(tmp_path, 0)
    state = read_state(scrape(tmp_path))
    assert state.phase == "probing"
    assert not state.models
    assert 'isochunk_calibration{phase="installed"} 1.0\n' in scrape(tmp_path)
