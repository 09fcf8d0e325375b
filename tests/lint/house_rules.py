#!/usr/bin/env python3
"""Lint rules of this house that ruff does not have: rooms, module names, docstrings, spelling.

Usage: python tests/lint/house_rules.py [PATH…]   (default: the whole product; exit code 1 with findings)
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("policies", "profiler", "sidecar", "slurm_plugin")
TEXTS = (*PRODUCT, "examples", "benchmarks", "container", "docs", "packaging", "tests")
MAX_MODULES = 15
CONVENTIONAL = frozenset({"__init__", "__main__", "main", "errors", "settings", "clock", "command"})
"""Module names with one meaning wherever they stand: entry point, exceptions, settings, time, a click command."""
OPENINGS = frozenset({"What", "Who", "Whom", "Whose", "Which", "Whether", "How", "Where", "Of", "That", "Is"})
"""First words of a docstring that is neither an imperative nor a noun phrase."""
OURS = re.compile(r"^\s*from (cadenza\.[\w.]+) import", re.MULTILINE)
ERROR = re.compile(r"^class (\w+)\((?:\w+Error|\w*Exception|\w+Lacks|\w+Unavailable)\)", re.MULTILINE)
CLAUSE = re.compile(r"(Return|Yield) (what|who|whom|those (that|who))\b")
"""An opening that puts a clause where a noun belongs."""
WORDS = re.compile(r"\b(nobody|somebody|everybody|anybody|meanwhile|beside|whom)\b", re.IGNORECASE)
BRITISH = re.compile(
    r"\b\w*(favour|colour|behaviour|neighbour|honour|utilis|normalis|initialis|serialis|optimis|minimis|maximis|parametris"
    r"|discretis|organis|recognis|summaris|synchronis|prioritis|labell(?!edby)|modell|judgement|licence|grey\b|centre\b)\w*",
    re.IGNORECASE,
)


def modules(paths: list[Path]) -> Iterator[Path]:
    """Yield the Python files below these paths, without caches."""
    for path in paths:
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def rooms() -> Iterator[str]:
    """Yield a finding for each folder with too many modules, and each module or error whose name has two meanings."""
    files = [file.relative_to(ROOT) for file in modules([ROOT / name for name in PRODUCT])]
    counts = Counter(file.parent for file in files if file.stem != "__init__")
    yield from (f"{room}: {n} modules, at most {MAX_MODULES}" for room, n in counts.items() if n > MAX_MODULES)
    names = Counter(file.stem for file in files if file.stem not in CONVENTIONAL)
    yield from (f"{file}: another module is called {file.stem} too" for file in files if names[file.stem] > 1)
    errors = Counter(name for file in files for name in ERROR.findall((ROOT / file).read_text()))
    yield from (f"{name}: {n} classes of errors have this name" for name, n in errors.items() if n > 1)


def unfollowed_imports() -> Iterator[str]:
    """Yield a finding for each import of ours that pyright, which runs no import hook, cannot follow to its file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    texts = [file.read_text() for file in modules([ROOT / name for name in TEXTS])]
    for name in sorted({found for text in texts for found in OURS.findall(text)}):
        path = Path(*name.split("."))
        ends = [ROOT / root / end for root in settings["extraPaths"] for end in (f"{path}.py", path / "__init__.py")]
        found = next((end for end in ends if end.is_file()), None)
        if found is None or not found.resolve().is_relative_to(ROOT):
            yield f"{name}: an editor does not find it in this tree; run `make install`"


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, those below assignments included."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    for child in [child for body in bodies for child in body if isinstance(child, ast.Expr)]:
        if isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
            yield child.lineno, child.value.value


def hidden_imports(tree: ast.AST, within: str) -> Iterator[int]:
    """Yield the lines that import modules of ``within`` for type checkers only, which would hide a circle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in (one for statement in node.body for one in ast.walk(statement)):
                if isinstance(child, ast.ImportFrom) and (child.module or "").startswith(within):
                    yield child.lineno


def english(file: Path) -> Iterator[str]:
    """Yield a finding for each docstring and comment of a module that breaks a rule."""
    source = file.read_text()
    tree = ast.parse(source)
    here = file.relative_to(ROOT)
    for line, text in docstrings(tree):
        first = text.split(maxsplit=1)[0] if text.strip() else ""
        if first in OPENINGS:
            yield f"{here}:{line}: a docstring starts with {first!r}: name the thing, or say what the function does"
        if clause := CLAUSE.match(text):
            yield f"{here}:{line}: a docstring starts with {clause[0]!r}: name the thing that is returned"
        yield from (f"{here}:{line}: {found[0]!r} in a docstring" for found in WORDS.finditer(text))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from (f"{here}:{token.start[0]}: {found[0]!r} in a comment" for found in WORDS.finditer(token.string))
    if "client" not in here.parts:  # the client's doors import torch late, which a type checker may see early
        # Commands import the floors below late; since no floor below may import cli, these imports hide no circle.
        within = "cadenza.slurm_plugin.cli" if "cli" in here.parts else "cadenza"
        lines = hidden_imports(tree, within)
        yield from (f"{here}:{line}: an import for type checkers only hides a circle" for line in lines)


def spelling(paths: list[Path]) -> Iterator[str]:
    """Yield a finding for each British spelling in a text file."""
    kinds = {".py", ".md", ".c", ".h", ".lua", ".toml", ".sh", ".js", ".css", ".html", ".cfg", ""}
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and file.suffix in kinds and "__pycache__" not in file.parts and file != Path(__file__):
                here = file.relative_to(ROOT)
                for number, line in enumerate(file.read_text(errors="replace").split("\n"), 1):
                    yield from (f"{here}:{number}: {m[0]!r} is British" for m in BRITISH.finditer(line))


def main() -> int:
    """Print the findings below the given paths; return 1 if there are any."""
    given = [Path(name).resolve() for name in sys.argv[1:]]
    product = given or [ROOT / name for name in PRODUCT]
    found = [] if given else [*rooms(), *unfollowed_imports()]
    for file in modules([path for path in product if path.suffix in {"", ".py"}]):
        found += english(file)
    found += spelling(given or [ROOT / name for name in (*TEXTS, "README.md")])
    print("\n".join(found))
    print(f"house rules: {len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
