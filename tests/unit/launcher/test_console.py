"""What the launcher shows, on a terminal and without one."""

import contextlib
import io
from pathlib import Path

import pytest

from isochunk.pd.launcher.console import LogConsole


def show(tmp_path: Path) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        console = LogConsole(["prefill-0", "router"], tmp_path)
        console.begin_waiting(["prefill-0", "router"])
        console.log("prefill-0", "loading [bold]weights[/bold] 50%")
        console.show_step("router", "healthy")
        console.end_waiting()
        console.announce("ready: http://127.0.0.1:8000")
        console.close()
    return output.getvalue()


def test_plain_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert show(tmp_path).splitlines() == [
        "isochunk  | waiting for prefill-0, router",
        "prefill-0 | loading [bold]weights[/bold] 50%",
        "ready: http://127.0.0.1:8000",
    ]


def test_colours_and_progress_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = show(tmp_path)
    assert "\x1b[36mprefill-0 | \x1b[0mloading [bold]weights[/bold] 50%" in text
    assert "router: starting" in text
    assert text.splitlines()[-1].endswith("ready: http://127.0.0.1:8000")
    assert (tmp_path / "prefill-0.log").read_text() == "loading [bold]weights[/bold] 50%\n"


def test_reader_that_goes_away_stops_nothing(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    with contextlib.redirect_stdout(Closed()):
        console = LogConsole(["router"], tmp_path)
        console.log("router", "one")
        console.log("router", "two")
        console.close()
    assert (tmp_path / "router.log").read_text() == "one\ntwo\n"
