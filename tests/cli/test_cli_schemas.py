"""Each ``--json`` of each command begins with a schema that is listed, in the program and in the documentation."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from cadenza.slurm_plugin.cli.common import SCHEMAS, emit
from cadenza.slurm_plugin.cli.main import main

ROOT = Path(__file__).parents[2]
CLI = ROOT / "slurm_plugin" / "cli"


class Row(msgspec.Struct):
    schema: str = "of its own"
    key: int = 1


@pytest.mark.parametrize(
    ("value", "fields"), [({"key": 1}, {"key": 1}), (Row(), {"key": 1}), ([1, 2], {"rows": [1, 2]}), ((), {"rows": []})]
)
def test_the_first_key_is_the_schema(value: object, fields: object, capsys: pytest.CaptureFixture[str]) -> None:
    emit("cadenza.top/1", value)
    text = capsys.readouterr().out
    assert text.startswith('{"schema":"cadenza.top/1"')
    assert json.loads(text) == {"schema": "cadenza.top/1", **fields}  # type: ignore[dict-item]


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield all commands that are no groups, by their words."""
    if not isinstance(group, click.Group):
        yield " ".join(path), group
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        one = group.get_command(context, name)
        assert one is not None
        yield from commands(one, (*path, name))


def schemas_below(folder: Path) -> set[str]:
    """Return the schemas that the modules of a folder emit."""
    nodes = (node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    calls = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "emit")
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_every_command_with_json_has_a_schema_that_is_listed() -> None:
    with_json = {
        words: command for words, command in commands(main) if any("--json" in one.opts for one in command.params)
    }
    assert len(with_json) > 12
    assert schemas_below(CLI) == set(SCHEMAS)
    for words, command in with_json.items():
        assert command.callback is not None
        room = ROOT / Path(*command.callback.__module__.split(".")[1:-1])
        assert schemas_below(room), f"`cadenza {words} --json` prints no schema"


def test_nothing_prints_json_but_emit() -> None:
    for file in CLI.rglob("*.py"):
        if file.name != "common.py":
            text = file.read_text()
            assert not re.search(r"(say|echo)\([^\n]*json\.(encode|dumps)", text), file


def test_the_page_lists_each_schema() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`(cadenza\.[a-z-]+/\d+)`", page)) >= {*SCHEMAS, "cadenza.jobs-here/1"}
