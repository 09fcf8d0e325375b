"""MkDocs hooks: pages generated from the code, diagrams drawn from its state tables, and a check of the built site."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import message_catalog
import metric_tables
import move_table
import record_tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from state_diagram import draw

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files of the repository's root."""
LOADING = dict.fromkeys(("script", "img", "iframe", "source", "audio", "video"), "src") | {"link": "href"}
"""HTML elements that load their attribute's address."""
MOVE_PHASES = ("wanted", "prefetching", "ordered", "requeued", "placed", "leaving", "over")
SESSION = (
    "boundary", "active", "trained", "gpus", "tuning", "register", "call", "checkpointed", "requeued_by", "waited",
    "timed", "detach",
)  # fmt: skip
STATE = ("state_dict", "load_state_dict")
KEEPER = ("restore", "save", "at", "every", "step", "wait", "close")
"""Members that training scripts use."""
CLIENT_HEAD = """\
# Client API

`from cadenza.sidecar import client`. This page is generated from the docstrings. [Turns](../users/turns.md),
[checkpoints](../users/checkpoints.md) and [data loading](../users/data.md) explain the use,
[frameworks](../users/frameworks.md) has the callbacks."""
MAX_SIGNATURE = 100
SETTINGS_HEAD = """\
# Settings

Every key of `/etc/cadenza/cadenza.toml` with its default. Files in `/etc/cadenza/conf.d/*.toml` are read after it, in
order of their names. `cadenza config` prints the values in force and where each comes from; `cadenza config --check`
checks the files. This page is generated from the definition of the settings."""
EXPERT_HEAD = ("", "Keys for unusual sites and for tests; `cadenza config` shows those that are set.")
ROOMS = ("policies", "profiler", "sidecar", "slurm_plugin")
PACKAGES_HEAD = """\
# Packages

The packages of the source, by their own docstrings; [architecture](../architecture.md) says how they work together."""
POLICIES_HEAD = """\
# Policies

The names that `[policy] order`, `allocate` and `share` take, and `cadenza simulate` too. This page is generated from
the registry; [choose a policy](../policies.md) says which is for what."""
COMMANDS_HEAD = """\
# Commands

This page is generated from the commands' own `--help`. Exit codes: 0 done, 1 failed, 2 usage or bad input, 3 the
environment lacks something, which is named. The daemons are `cadenzad` (the policy service) and `cadenza-agent` (one on
every GPU host); both take `--config FILE`.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and diagrams."""
    pages = {page: _root_page(name) for page, name in ROOT_PAGES.items()}
    pages["reference/settings.md"] = settings_page()
    pages["reference/commands.md"] = commands_page()
    pages["reference/client.md"] = client_page()
    pages["reference/policies.md"] = policies_page()
    pages["reference/packages.md"] = packages_page()
    pages["reference/messages.md"] = message_catalog.page()
    for uri, text in pages.items():
        files.append(File.generated(config, uri, content=text))
    for uri, drawing in diagrams().items():
        files.append(File.generated(config, uri, content=drawing))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in the tables of measurements, of metrics, and of a class's fields."""
    text = metric_tables.filled(record_tables.filled(markdown, ROOT), ROOT)
    return re.sub(r"<!-- fields: (\S+) (\w+) -->", lambda wish: fields_table(ROOT / wish[1], wish[2]), text)


def fields_table(file: Path, name: str) -> str:
    """Return a class's fields with the texts below them; a field without one shares that of the field before."""
    tree = ast.parse(file.read_text())
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    rows: list[tuple[list[str], str]] = []
    for node in body:
        if isinstance(node, ast.AnnAssign):
            if not rows or rows[-1][1]:
                rows.append(([], ""))
            rows[-1][0].append(ast.unparse(node.target))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and rows:
            rows[-1] = (rows[-1][0], " ".join(str(node.value.value).split()))
    lines = [f"| {', '.join(f'`{field}`' for field in names)} | {text} |" for names, text in rows]
    return "\n".join(["| key | meaning |", "|---|---|", *lines])


def on_post_build(config: MkDocsConfig) -> None:
    """Fail if a page of the built site would load anything from another host."""
    site = Path(config.site_dir)
    findings = [f"{page.relative_to(site)}: {url}" for page in sorted(site.rglob("*.html")) for url in _loaded(page)]
    for sheet in sorted(site.rglob("*.css")):
        findings += [f"{sheet.name}: {url}" for url in re.findall(r"url\(['\"]?(https?:[^)'\"]+)", sheet.read_text())]
    if findings:
        raise PluginError("the site would load from another host:\n" + "\n".join(findings))


def _loaded(page: Path) -> Iterator[str]:
    """Yield the foreign addresses that a page loads."""
    found: list[str] = []

    class Reader(HTMLParser):
        """Collects addresses of loading elements."""

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            """Note a foreign address."""
            values = dict(attrs)
            url = values.get(LOADING.get(tag, "")) or ""
            if re.match(r"(https?:)?//", url) and values.get("rel") != "canonical":
                found.append(url)

    Reader().feed(page.read_text())
    yield from found


def _root_page(name: str) -> str:
    """Return a file of the root as a page of the site; its links into docs/ become links between pages."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
    for page, file in ROOT_PAGES.items():
        text = text.replace(f"]({file})", f"]({page})")
    return text


# --- Reference ---------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Return the reference of ``cadenza.toml``, one table a section."""
    from cadenza.slurm_plugin.service.settings_reference import rows, toml_value  # noqa: PLC0415 (only at build time)

    lines = [SETTINGS_HEAD]
    section = ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += ["", f"## [{section}]", *(EXPERT_HEAD if section == "expert" else ())]
            lines += ["", "| key | type | default | meaning |", "|---|---|---|---|"]
        unit = f" ({row.unit})" if row.unit else ""
        cells = (f"`{row.key}`", row.type, f"`{toml_value(row.default)}`", row.doc + unit)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the reference of all commands, as the command line itself prints it."""
    words = (sys.executable, "-m", "cadenza.slurm_plugin.cli.reference")
    text = subprocess.run(words, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    return text.replace("# Commands\n", COMMANDS_HEAD, 1)


def policies_page() -> str:
    """Return the table of all policies, as the registry has them."""
    from cadenza.policies.registry import ENTRIES  # noqa: PLC0415 (only at build time)

    rows = [f"| {entry.kind} | `{entry.name}` | {entry.line} | {entry.source} |" for entry in ENTRIES]
    return "\n".join([POLICIES_HEAD, "", "| kind | name | | source |", "|---|---|---|---|", *rows]) + "\n"


def packages_page() -> str:
    """Return the packages of the source with the first lines of their docstrings."""
    lines = [PACKAGES_HEAD, ""]
    for file in sorted(file for room in ROOMS for file in (ROOT / room).rglob("__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        lines.append(f"- `{file.parent.relative_to(ROOT)}`: {_markdown(text).partition(chr(10))[0]}")
    return "\n".join(lines) + "\n"


def client_page() -> str:
    """Return the reference of the functions and classes that training scripts use, from their docstrings."""
    from cadenza.sidecar import client  # noqa: PLC0415 (only at build time)
    from cadenza.sidecar.client.checkpoints import ResumableSampler  # noqa: PLC0415
    from cadenza.sidecar.client.checkpoints.checkpoint import Checkpoint  # noqa: PLC0415
    from cadenza.sidecar.client.data import CachedDataset, ElasticDataLoader  # noqa: PLC0415
    from cadenza.sidecar.client.session.job_session import Session  # noqa: PLC0415

    lines = [CLIENT_HEAD, "## Functions"]
    lines += [_described(getattr(client, name), f"client.{name}") for name in client.__all__]
    members_of = (
        (Session, "session", SESSION), (Checkpoint, "keeper", KEEPER), (ResumableSampler, "sampler", ("batches",)),
        (ElasticDataLoader, "loader", ("resize", *STATE)), (CachedDataset, "dataset", ("resize", "stats")),
    )  # fmt: skip
    for kind, name, members in members_of:
        lines += [f"## {kind.__name__}", _markdown(inspect.getdoc(kind) or "")]
        lines += [_described(inspect.getattr_static(kind, member), f"{name}.{member}") for member in members]
    return "\n\n".join(lines) + "\n"


def _described(thing: Any, name: str) -> str:
    """Return the section of one function, method or property."""
    text = name
    if isinstance(thing, property):
        thing = thing.fget
    else:
        signature = inspect.signature(thing)
        text += str(signature).replace("(self, ", "(").replace("(self)", "()")
        if len(text) > MAX_SIGNATURE:
            lines = "".join(f"    {item},\n" for item in signature.parameters.values() if item.name != "self")
            text = f"{name}(\n{lines}) -> {signature.return_annotation}"
    text = text.replace("'", "")
    return f"### {name}\n\n```text\n{text}\n```\n\n{_markdown(inspect.getdoc(thing) or '')}"


def _markdown(text: str) -> str:
    """Return a docstring as Markdown."""
    text = re.sub(r":(?:func|meth|class|data):`~?([\w.]+)`", r"`\1`", text)
    return re.sub(r"::$", ":", text.replace("``", "`"), flags=re.MULTILINE)


def diagrams() -> dict[str, str]:
    """Return the SVG drawings of the state machines' own tables, by address in the site."""
    from cadenza.sidecar.agent.driver import machine  # noqa: PLC0415 (only at build time)
    from cadenza.sidecar.agent.jobs import stop_states  # noqa: PLC0415
    from cadenza.sidecar.agent.leases import lease_table  # noqa: PLC0415

    return {
        "images/lease-states.svg": draw(
            lease_table.TRANSITIONS, "States of a lease", ("waiting", "held", "stopping", "yielded")
        ),
        "images/stop-states.svg": draw(
            stop_states.TRANSITIONS, "States of a stop", ("running", "aligning", "saving", "saved", "offloading")
        ),
        "images/driver-states.svg": draw(machine.TRANSITIONS, "States of a process under the driver path"),
        "images/move-phases.svg": draw(move_table.rows(), "Phases of a move", MOVE_PHASES),
    }
