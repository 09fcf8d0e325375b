"""A sweep's configurations: a CSV or JSON-lines file, a grid, or the search space and trials of an Optuna study."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Struct

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import decode, read_table
from cadenza.sidecar.config import load_file, where
from cadenza.slurm_plugin.sweep.study_plan import Name, Plan

Config: TypeAlias = dict[str, Any]
"""Names mapped to strings, numbers or booleans."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
MAX_CONFIGS = 10_000


class Study(Struct, frozen=True):
    """An Optuna study that suggests configurations and receives their results."""

    storage: str
    trials: int
    space: dict[str, Any]


class SweepFile(Plan, frozen=True, forbid_unknown_fields=True):
    """``sweep.toml``: the plan's keys and the source of the configurations."""

    name: Name = ""
    """Empty: that of the file."""
    configs: str | None = None
    grid: dict[str, list[Any]] | None = None
    study: str | None = None
    trials: int | None = None
    space: dict[str, Any] | None = None


class Request(Struct, frozen=True):
    """Contents of one file: a plan with its configurations, or with a study that suggests them."""

    plan: dict[str, Any]
    """Keys of Plan, which the command line may override."""
    configs: list[Config]
    study: Study | None = None


def read_request(path: Path) -> Request:
    """Read ``*.toml``, ``*.csv`` or ``*.jsonl``; raise InputError or ConfigError with file, line and key."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-_")[:40] or "sweep"
    if path.suffix != ".toml":
        return Request({"name": name}, read_configs(path))
    file = load_file(path, SweepFile)
    plan = {key: getattr(file, key) for key in Plan.__struct_fields__ if key != "name"}
    sources = [key for key in ("configs", "grid", "study") if getattr(file, key) is not None]
    if len(sources) != 1:
        raise InputError(f"{path}: one of configs, grid and study must be given, not {len(sources)} of them")
    configs: list[Config] = []
    if file.configs is not None:
        configs = read_configs(path.parent / file.configs)
    elif file.grid is not None:
        at = f"{where(path, ('grid',))}: grid"
        if not file.grid or not all(file.grid.values()):
            raise InputError(f"{at}: each name needs a list with at least one value")
        products = itertools.product(*file.grid.values())
        configs = _checked_all((at, dict(zip(file.grid, values, strict=True))) for values in products)
    return Request({**plan, "name": file.name or name}, configs, _study(path, file))


def _study(path: Path, file: SweepFile) -> Study | None:
    if file.study is None:
        for key in ("trials", "space"):
            if getattr(file, key) is not None:
                raise InputError(f"{where(path, (key,))}: {key} belongs to a study, and no study is named")
        return None
    if not file.trials or file.trials < 1:
        raise InputError(f"{where(path, ('study',))}: study needs trials = N, the number of configurations")
    if not file.space:
        raise InputError(f"{where(path, ('study',))}: study needs a table [space] of names and their ranges")
    for name, entry in file.space.items():
        _check_range(name, entry, where(path, ("space", name)))
    return Study(file.study, file.trials, file.space)


def _check_range(name: str, entry: Any, at: str) -> None:
    """Raise InputError unless the entry is a list of choices or a table with low and high."""
    _check_name(name, at)
    if isinstance(entry, list) and entry:
        return
    if not isinstance(entry, dict) or not {"low", "high"} <= entry.keys() <= {"low", "high", "log", "step"}:
        raise InputError(f"{at}: {name}: wanted is a list of choices or {{low = …, high = …, log = true, step = …}}")
    numbers = [value for key, value in entry.items() if key != "log"]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in numbers):
        raise InputError(f"{at}: {name}: low, high and step must be numbers")
    if entry["low"] > entry["high"]:
        raise InputError(f"{at}: {name}: low = {entry['low']} is more than high = {entry['high']}")


def read_configs(path: Path) -> list[Config]:
    """Return the configurations of a CSV file (names in the first line) or of a file with one JSON object per line."""
    try:
        text = decode(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if path.suffix == ".csv":
        return _checked_all(_csv(text, path))
    if path.suffix == ".jsonl":
        return _checked_all(_json_lines(text, path))
    raise InputError(f"{path}: wanted is a name that ends with .toml, .csv or .jsonl")


def _csv(text: str, path: Path) -> Iterator[tuple[str, Config]]:
    table = read_table(text, str(path), (), None)
    for line, cells in table.rows:
        yield f"{path}:{line}", dict(zip(table.columns, cells, strict=True))


def _json_lines(text: str, path: Path) -> Iterator[tuple[str, Config]]:
    for line, record in enumerate(text.splitlines(), 1):
        if not record.strip():
            continue
        try:
            value = json.loads(record)
        except ValueError as error:
            raise InputError(f"{path}:{line}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise InputError(f'{path}:{line}: wanted is an object such as {{"lr": 0.1}}')
        yield f"{path}:{line}", value


def _checked_all(entries: Iterator[tuple[str, Config]]) -> list[Config]:
    configs = [check_config(config, at) for at, config in entries]
    if not configs:
        raise InputError("no configuration in the file")
    if len(configs) > MAX_CONFIGS:
        raise InputError(f"{len(configs)} configurations are more than {MAX_CONFIGS}")
    return configs


def check_config(config: Mapping[str, Any], at: str) -> Config:
    """Return the configuration; raise InputError unless its names and values can stand in a command."""
    for name, value in config.items():
        _check_name(name, at)
        if not isinstance(value, str | int | float | bool):
            raise InputError(f"{at}: {name}: wanted is a text, a number or a boolean, not {value!r}")
    return dict(config)


def _check_name(name: str, at: str) -> None:
    if not NAME.fullmatch(name):
        raise InputError(f"{at}: {name!r} is not a name: letters, digits, _ and -, beginning with a letter")
    if name in RESERVED:
        raise InputError(f"{at}: {name!r} is set by the sweep itself")


RESERVED: Sequence[str] = ("number", "sweep")
"""Placeholders that the sweep itself fills in."""
