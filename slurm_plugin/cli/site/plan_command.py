"""``cadenza plan``: the lines that a site adds to its configuration, and the check that they are in force."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from cadenza.policies.inputs.cluster import MAX_LANES
from cadenza.sidecar.config import DEFAULT_PATH
from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, say
from cadenza.slurm_plugin.cli.site.command import show
from cadenza.slurm_plugin.cli.site.leftovers import MAX_BYTES, USER, show_leftovers, text_of
from cadenza.slurm_plugin.gateway.slurm_gateway import TIMEOUT_S, answer_of, json_of, slurm_config
from cadenza.slurm_plugin.gateway.slurm_json import Refused, left_out
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.site.checks import Finding, failed, uses_factors
from cadenza.slurm_plugin.site.lane_plan import (
    LanePlan,
    decode_nodes,
    foreign_partitions,
    lacking,
    names_in,
    plan_lanes,
)
from cadenza.slurm_plugin.site.site_priority import lacks

FILES = ("cadenza.conf", "gres.conf", "lua.conf", "cadenza.toml")


@click.command("plan")
@click.argument("nodes", nargs=-1, metavar="[NODES]...")
@click.option("--partition", "partitions", multiple=True, metavar="NAME",
              help="A partition that Cadenza manages; may be repeated.")  # fmt: skip
@click.option("--lanes", type=click.IntRange(1, MAX_LANES),
              help="Lanes of each host (default: as many as Slurm has).")  # fmt: skip
@click.option("--file", "name", type=click.Choice(FILES), help="Print the content of this file alone.")
@click.option("--check", is_flag=True, help="Check that Slurm has these lines in force, and this machine its files.")
@click.option("--remove", is_flag=True, help="List what is left of Cadenza, here and in Slurm, and how it is removed.")
@json_option
@config_option
def command(  # noqa: PLR0913 (its options)
    *, nodes: tuple[str, ...], partitions: tuple[str, ...], lanes: int | None, name: str | None, check: bool,
    remove: bool, as_json: bool, config: Path | None,
) -> None:  # fmt: skip
    """Print the lines that this site needs for the GPU hosts of a partition, or for NODES (gpu[1-4]) of them.

    They are made of what scontrol says, on the controller; nothing is changed. With --lanes 2 or more, cadenza.conf
    takes the place of the hosts' lines in slurm.conf, and the lines of gres.conf are added to it; with one lane it has
    settings only. Once the lines are in force, the same command prints them again, and with --check the exit code is 1
    if one of them is missing. With --remove it is 1 if more than the programs is left.
    """
    mistakes = {
        "--remove lists all that is left: give it alone":
            remove and (nodes or partitions or lanes or name or check),
        "--partition is missing: name those that Cadenza is to manage": not partitions and not remove,
        "--file prints one file as it is: give it without --check and --json": name and (check or as_json),
    }  # fmt: skip
    for text in (text for text, made in mistakes.items() if made):
        raise click.UsageError(text)
    if remove:
        raise SystemExit(show_leftovers(config, as_json=as_json))
    # 1. What Slurm says, and what it lacks.
    slurm = slurm_config()
    present, refused = decode_nodes(json_of(("scontrol", "--all", "show", "node"), TIMEOUT_S))
    chosen = [one for expression in nodes for one in names_in(expression)]
    folder, own = Path(slurm.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent, config or DEFAULT_PATH
    full_memory = own.exists() and load_settings(own).service.lanes_memory == "full"
    number = lanes or 1 + max((node.lane for node in present), default=0)
    plan = plan_lanes(present, slurm, partitions, number, chosen, full_memory=full_memory)
    if uses_factors(load_settings(own) if own.exists() else Settings()):
        plan = with_priority(plan, slurm)
    say(*remarks(plan, refused, partitions), err=True)
    # 2. Compare, or print.
    if check:
        findings = [*lacking(plan, present), *missing_files(plan, folder, own), *_rights(slurm)]
        show(findings, as_json=as_json)
        raise SystemExit(int(failed(findings)))
    contents = {
        str(folder / "cadenza.conf"): plan.slurm_conf(),
        str(folder / "gres.conf"): list(plan.gres_conf(with_includes(folder / "gres.conf"))),
        str(own.with_name("lua.conf")): plan.lua_conf(),
        str(own.with_name("cadenza.toml")): toml(partitions, slurm),
    }
    if as_json:
        emit("cadenza.plan/1", {"files": contents, "commands": commands(plan, own)})
        return
    if name:
        lines = next(lines for place, lines in contents.items() if Path(place).name == name)
        for line in lines:
            say(line, length=MAX_BYTES)  # a list of nodes may be longer than say() allows
        return
    for place, lines in contents.items():
        say(f"# --- {place}", *lines, "")
    say("# --- commands", *commands(plan, own))


def remarks(plan: LanePlan, refused: Sequence[Refused], partitions: Sequence[str]) -> Iterator[str]:
    """Yield sentences on nodes that cannot be read, and on hosts that other partitions have as well."""
    if refused:
        yield left_out(refused, "nodes")
    if said := foreign_partitions(plan.nodes, partitions):
        yield f"{said}, too: jobs there have these GPUs as well, and Cadenza leaves them alone"


def with_priority(plan: LanePlan, slurm: Mapping[str, str]) -> LanePlan:
    """Return a plan with the settings of Slurm's priority by which jobs can make way."""
    lines, undecided = dict(plan.settings), dict(plan.undecided)
    for one in lacks(slurm):
        if one.decided:
            lines |= dict(line.split("=") for line in one.lines)
        else:
            undecided[one.key] = f"it is {one.observation}; {' '.join(one.lines)}"
    return msgspec.structs.replace(plan, settings=lines, undecided=undecided)


def toml(partitions: tuple[str, ...], slurm: Mapping[str, str]) -> list[str]:
    """Return the lines of cadenza.toml; the service runs where slurmctld does."""
    controller = re.match(r"[\w.-]+", slurm.get("SlurmctldHost[0]", ""))
    names = ", ".join(f'"{name}"' for name in partitions)
    service = f'service = "tcp://{controller[0] if controller else "CONTROLLER"}:6850"'
    return ["[service]", 'mode = "observe"', "[guard]", f"partitions = [{names}]", "[agent]", service]


def commands(plan: LanePlan, own: Path) -> list[str]:
    """Return the commands with this site's names, in their order."""
    hosts = plan.hosts
    keys = f"cadenza keygen --out {own.parent / 'keys'} {' '.join(hosts)}"
    if plan.lanes == 1:
        return [keys]
    units = {host: [node.name for node in plan.nodes if plan.first(node) == host] for host in hosts}
    return [
        f"scontrol update nodename={','.join(hosts)} state=drain reason=lanes",
        keys,
        *(
            f"{host}: systemctl disable --now slurmd; systemctl enable --now slurmd@{' slurmd@'.join(lanes)}"
            for host, lanes in units.items()
        ),
    ]


def missing_files(plan: LanePlan, folder: Path, own: Path) -> Iterator[Finding]:
    """Yield a finding for each file of Slurm's folder and of Cadenza's on this machine, the controller."""

    def found(path: Path, fault: str, advice: str, *, good: bool) -> Finding:
        return Finding("OK", str(path), "as planned") if good else Finding("FAIL", str(path), fault, advice)

    lines = list(plan.gres_conf(with_includes(folder / "gres.conf")))
    yield found(folder / "gres.conf", "it names nodes, and not all lanes", "; ".join(lines), good=not lines)
    lua, plugins, settings = folder / "job_submit.lua", folder / "plugstack.conf", own.with_name("lua.conf")
    loads = "cadenza" in text_of(lua)
    yield found(lua, "it is not Cadenza's, and does not load it", "see docs/install.md", good=loads)
    named = "cadenza.so" in with_includes(plugins)
    yield found(plugins, "it does not name cadenza.so", "add the line: optional cadenza.so", good=named)
    same = set(plan.lua_conf()) <= set(text_of(settings).split())
    yield found(settings, "it differs from the plan", "cadenza plan --file lua.conf", good=same)
    table = load_settings(own) if own.exists() else Settings()
    managed = set(plan.members) <= table.guard.partitions and bool(table.agent.service)
    advice = "cadenza plan --file cadenza.toml"
    yield found(own, "[guard] partitions or [agent] service is missing", advice, good=managed)


def _rights(slurm: Mapping[str, str]) -> Iterator[Finding]:
    """Yield whether the service's user may drain and open nodes, where Slurm's accounting says so."""
    if not slurm.get("AccountingStorageType", "").endswith("slurmdbd") or shutil.which("sacctmgr") is None:
        return
    question = ("sacctmgr", "--noheader", "--parsable2", "show", "user", USER, "format=adminlevel")
    level = answer_of(question, TIMEOUT_S).strip()
    advice = f"sacctmgr add user {USER} account=root adminlevel=Administrator"
    about = f"accounting user {USER}"
    yield Finding("OK" if level == "Administrator" else "FAIL", about, f"admin level {level or 'unknown'}", advice)


def with_includes(path: Path) -> str:
    """Return the text of a file of Slurm's and of those that its lines ``include PATTERN`` name."""
    text = text_of(path)
    for pattern in re.findall(r"^\s*include\s+(\S+)", text, re.MULTILINE | re.IGNORECASE):
        folder = Path("/") if pattern.startswith("/") else path.parent
        text = "\n".join([text, *(text_of(one) for one in sorted(folder.glob(pattern.lstrip("/"))))])
    return text
