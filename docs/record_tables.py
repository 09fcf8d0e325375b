"""Tables of measurements, from benchmarks/results; a page asks for them by ``<!-- records: NAME … -->``."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks") / "results"
WISH = re.compile(r"<!-- records: ([\w ]+) -->")
ACCEPTANCE = "h100-2026-11-26.json"
COLUMNS = ("measurement", "figure", "command", "recorded")


def filled(text: str, root: Path) -> str:
    """Return a page with each request replaced by the tables that it names."""
    records = tomllib.loads((root / RESULTS / "records.toml").read_text())

    def tables(wish: re.Match[str]) -> str:
        names = wish[1].split()
        return "\n\n".join(_acceptance(root) if name == "acceptance" else _topic(records[name]) for name in names)

    return WISH.sub(tables, text)


def _topic(topic: dict[str, Any]) -> str:
    columns = topic.get("columns")
    rows = topic["rows"] if columns else [(what, figure, f"`{by}`", on) for what, figure, by, on in topic["rows"]]
    said = [topic.get("note", "")]
    if "command" in topic:
        said.append(f"`{topic['command']}` ({topic['recorded']}).")
    return _folded(topic["title"], " ".join(filter(None, said)), _table(columns, rows))


def _folded(title: str, said: str, table: str) -> str:
    """Return a block that a reader opens."""
    inside = f"{said}\n\n{table}".strip()
    title = title.replace('"', "").replace("`", "")
    return f'??? abstract "{title}"\n\n' + "\n".join(f"    {line}" if line else "" for line in inside.split("\n"))


def _acceptance(root: Path) -> str:
    """Return the table of the acceptance run, whose rows carry figures by name."""
    run = json.loads((root / RESULTS / ACCEPTANCE).read_text())
    rows = [
        (row["name"], row["outcome"], row["why"] or ", ".join(f"{k} {_short(v)}" for k, v in row["figures"].items()))
        for row in run["rows"]
    ]
    machine = ", ".join(f"{key} {value}" for key, value in run["machine"].items())
    said = f"`benchmarks/gpu/acceptance.py` (2026-11-26, 857609a, 417 s). {machine}."
    return _folded("One H100: all rows", said, _table(("row", "outcome", "figures, or why"), rows))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(columns: Iterable[str] | None, rows: Iterable[Iterable[str]]) -> str:
    lines = [columns or COLUMNS, ["---"] * len(list(columns or COLUMNS)), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
