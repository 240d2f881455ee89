"""docs/deployments.md shows what `isochunk up --check` prints for each example.

After a change, UPDATE_DOCS=1 python -m pytest tests/unit/test_topology_docs.py writes it anew.
"""

import os
import re
from pathlib import Path

from isochunk.pd.check_report import describe_deployment
from isochunk.pd.topology_file import load_topology

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "deployments.md"
BLOCK = re.compile(r"<!-- check: (\S+) -->\n(?:\n```sh\n.*?```\n)?", re.DOTALL)


def regenerate(match: re.Match[str]) -> str:
    deployment = load_topology(ROOT / "examples" / match[1])
    assert deployment.warnings == ()
    return f"<!-- check: {match[1]} -->\n\n```sh\n{describe_deployment(deployment)}```\n"


def test_docs_show_the_commands_of_every_example() -> None:
    text = DOCS.read_text()
    expected = BLOCK.sub(regenerate, text)
    if os.environ.get("UPDATE_DOCS"):
        DOCS.write_text(expected)
    assert DOCS.read_text() == expected
    examples = {path.name for path in (ROOT / "examples").glob("*.yaml")}
    assert {match[1] for match in BLOCK.finditer(text)} == examples
