"""Tables of the metrics, from the calls that make them; a page asks for them by ``<!-- metrics: service -->``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from assignments import assigned

WISH = re.compile(r"<!-- metrics: (\w+) -->")
FILES = {"service": "slurm_plugin/service/metrics", "agent": "sidecar/agent/telemetry/agent_metrics.py"}
KINDS = {
    "_gauge": "gauge", "counter": "counter", "CounterMetricFamily": "counter",
    "histogram": "histogram", "Histogram": "histogram",
}  # fmt: skip
"""Functions that make a metric, with its type."""


def filled(text: str, root: Path) -> str:
    """Return a page with each request replaced by a table."""
    return WISH.sub(lambda wish: _table(root / FILES[wish[1]]), text)


def _table(place: Path) -> str:
    files = [place] if place.is_file() else sorted(place.glob("*.py"))
    rows = sorted({row for file in files for row in _metrics(ast.parse(file.read_text()))})
    lines = [f"| `{name}` | {kind} | {labels} | {text} |" for name, kind, labels, text in rows]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *lines])


def _metrics(tree: ast.AST) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, labels and meaning of each metric that a module makes."""
    words = assigned(tree)
    for node in ast.walk(tree):
        kind = KINDS.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if kind is None or not isinstance(node, ast.Call):
            continue
        given = [words.get(one.id, one) if isinstance(one, ast.Name) else one for one in node.args[:2]]
        texts = [one.value for one in given if isinstance(one, ast.Constant)]
        if len(texts) < len(given):
            continue  # the function that the others call
        found = [part for item in (*node.args[2:], *node.keywords) for part in _labels(item, words)]
        name = f"cadenza_{str(texts[0]).removeprefix('cadenza_')}" + ("_total" if kind == "counter" else "")
        yield name, kind, ", ".join(f"`{label}`" for label in found), str(texts[1])


def _labels(item: ast.AST, words: dict[str, ast.expr]) -> Iterator[str]:
    """Yield the labels among an argument's texts, those of a constant of the module included."""
    if isinstance(item, ast.Starred | ast.keyword):
        item = item.value
    if isinstance(item, ast.Name):
        item = words.get(item.id, item)
    if isinstance(item, ast.Constant | ast.Tuple | ast.List):
        parts = [item] if isinstance(item, ast.Constant) else item.elts
        yield from (str(part.value) for part in parts if isinstance(part, ast.Constant) and part.value)
