"""The sentences of ``cadenza why``, taken from the source of the policies; ``…`` stands for what is filled in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "Slurm's queue, and jobs that make way for its first ones": "policies/sharing/preemption/*.py",
    "Turns": "policies/sharing/turns/*.py",
    "The guard, which keeps an action in": "policies/guard.py",
    "Placement of jobs, and division of a host": "policies/sharing/placement/*.py policies/sharing/state/pending.py",
    "Packing": "policies/sharing/pac*/*.py policies/sharing/state/measurement.py",
    "Moves chosen by the policy": "policies/sharing/migration/*.py",
    "Sizes and loans of CPUs": "policies/sharing/elastic/*.py",
    "A move on its way": "policies/relocation/*.py",
    "Requests of pending jobs": "policies/request_sizing.py",
    "Without sharing, and allocations": "policies/exclusive.py policies/composition.py policies/allocation/**/*.py",
    "About a job as a whole": "policies/sharing/state/settings.py slurm_plugin/views/job_sentences.py",
}
MIN_WORDS = 4
HEAD = """\
# Messages of `cadenza why`

The sentences in which policies give their reasons, by part; `…` stands for what is filled in, such as a job, a node or
a number. Sentences are joined by `;`. This page is generated from the source. [Troubleshooting](../troubleshooting.md)
says what to do."""


def page() -> str:
    """Return the catalog as Markdown."""
    blocks = [HEAD]
    for title, patterns in PARTS.items():
        files = sorted({file for pattern in patterns.split() for file in ROOT.glob(pattern)})
        sentences = dict.fromkeys(sentence for file in files for sentence in _sentences(ast.parse(file.read_text())))
        blocks += [
            f"## {title}",
            "\n".join(f"- {sentence}" for sentence in sentences),
        ]
    return "\n\n".join(blocks) + "\n"


def _sentences(tree: ast.Module) -> Iterator[str]:
    """Yield a module's texts of some words, without docstrings, errors and descriptions of settings."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (
            isinstance(node, ast.Call) and _name(node.func) in {"Meta", "option", "echo"}
        ):
            skipped |= {id(child) for child in ast.walk(node)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(child) for child in ast.walk(node) if child is not node}
    texts = ((node, _text(node)) for node in ast.walk(tree) if id(node) not in skipped)
    found = sorted((node.lineno, text) for node, text in texts if text and len(text.split()) >= MIN_WORDS)
    yield from (text.strip(" ;") for _, text in found if "\n" not in text and not text.startswith(","))


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
