"""The table of a move's phases, taken from the code itself: what actions lead to, and how phases end.

Actions are tried on every phase. The endings are the outcomes in the source of the phases' functions, with ``…`` for
what is filled in.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import get_args

import msgspec
from assignments import assigned

from cadenza.policies.core.actions import MakeWay, Migrate, Place, Release, Requeue, Save
from cadenza.policies.core.model import JobKey
from cadenza.policies.core.move import Move, Over, Phase, Wanted
from cadenza.policies.relocation import phases

JOB, NEXT = JobKey(1, 0), JobKey(1, 1)
ACTIONS = {
    "checkpoint ordered": Migrate(JOB, (), ""),
    "files to read first": Migrate(JOB, (), "", prefetch=("host",)),
    "files read, or time over": Save(JOB, ""),
    "checkpoint complete: requeue": Requeue(JOB, hold=True, reason=""),
    "all that make way have saved: requeue": MakeWay((JOB,), (0,), JobKey(2, 0), ""),
    "held in the queue: place": Place(NEXT, (), ""),
    "no place: release": Release(NEXT, ""),
}
TREE = ast.parse(inspect.getsource(phases))
FUNCTIONS = {node.name: node for node in TREE.body if isinstance(node, ast.FunctionDef)}
VARIABLES = assigned(TREE)


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield phase, event and next phase."""
    for kind in get_args(Phase):
        fields = [field for field in msgspec.structs.fields(kind) if field.required]
        move = Move(JOB, (), "", kind(*("" if field.type is str else 0.0 for field in fields)))
        for event, action in ACTIONS.items():
            after = type(phases.acted((move,), (action,), 1.0)[0].phase)
            yield _name(kind), event, _name(after)
    for kind in get_args(Phase):
        for call in _calls(f"_{_name(kind)}", set()):
            if call.func.id == "_end":
                yield _name(kind), _outcome(call.args[2]), _name(Over)
            elif call.func.id == "Wanted":
                yield _name(kind), "cannot be stopped", _name(Wanted)


def _name(kind: type) -> str:
    return kind.__name__.lower()


def _calls(function: str, seen: set[str]) -> Iterator[ast.Call]:
    """Yield the calls by name in a function of the module and in the functions that it calls."""
    seen.add(function)
    for node in ast.walk(FUNCTIONS[function]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node
            if node.func.id in FUNCTIONS.keys() - {"_end"} - seen:
                yield from _calls(node.func.id, seen)


def _outcome(text: ast.expr) -> str:
    """Return an outcome's text, with ``…`` for what is filled in."""
    if isinstance(text, ast.Name):
        if hasattr(phases, text.id):
            return str(getattr(phases, text.id)).removeprefix("not moved: ")
        text = VARIABLES[text.id]
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    words = "".join(_part(part) for part in parts)
    return words.removeprefix("not moved: ").removesuffix(", see its yields and resumes").removesuffix(": …")


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    name = part.value if isinstance(part, ast.FormattedValue) else part
    constant = getattr(phases, name.id, "…") if isinstance(name, ast.Name) else "…"
    return f"{constant:.0f}" if isinstance(constant, float) else str(constant)
