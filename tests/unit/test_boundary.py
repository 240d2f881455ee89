"""The core imports the standard library, NumPy, SciPy and Pydantic only."""

import ast
import subprocess
import sys
from pathlib import Path

import isochunk

PACKAGE = Path(isochunk.__file__).parent
# Around the core: the command line, pictures, metrics, HTTP. Engines live in subpackages.
NOT_CORE = {"cli", "client", "report", "metrics", "plan_cli", "plan_html", "progress_bar"}
OUTSIDE = {"vllm", "demo", "pd", "calibrate", "benchmark"}
ALLOWED = {"numpy", "scipy", "pydantic", "isochunk"} | sys.stdlib_module_names


def test_core_imports_stay_within_the_boundary() -> None:
    modules = [path for path in PACKAGE.glob("*.py") if path.stem not in NOT_CORE]
    assert len(modules) > 8
    offences = []
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                parts = name.split(".")
                is_ours = parts[0] == "isochunk" and not OUTSIDE & set(parts[1:2])
                if not (is_ours or (parts[0] in ALLOWED and parts[0] != "isochunk")):
                    offences.append(f"{path.name}: {name}")
                if parts[0] == "isochunk" and parts[1:2] and parts[1] in NOT_CORE:
                    offences.append(f"{path.name}: {name}")
    assert not offences


def test_importing_the_core_loads_no_engine() -> None:
    code = (
        "import sys, isochunk, isochunk.controller; "
        "print([m for m in ('torch', 'vllm', 'typer', 'plotly') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_the_command_line_leaves_prometheus_to_serve() -> None:
    # prometheus_client reads PROMETHEUS_MULTIPROC_DIR on import, and `serve` sets it.
    code = "import sys, isochunk.cli; print('prometheus_client' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_adapter_stays_thin() -> None:
    lines = {p.stem: len(p.read_text().splitlines()) for p in (PACKAGE / "vllm").glob("*.py")}
    assert lines.pop("batch_queue") < 85  # the patch of the engine core
    assert sum(lines.values()) < 500
