#!/usr/bin/env python3
"""Push hostile inputs through every decoder: only the decoder's own error may come of one, and exit code 2 of a file.

Inputs are good ones of each boundary, changed at random: numbers at and beyond the edges of 32 and 64 bits, numbers
that are not finite, surrogates, control characters, deep nesting, missing and unknown keys, cut and mixed bytes. What a
decoder takes is pushed on through the first code behind it. The N-th input of a boundary follows from seed and N alone,
so that a failure can be repeated. One refused file in a thousand is also given to its command.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from click.testing import CliRunner

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.costs import read_costs
from cadenza.policies.inputs.csv_table import decode as text_in
from cadenza.policies.inputs.failures import read_failures
from cadenza.policies.inputs.interference import read_interference
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.policies.inputs.published import synergy_profiles, text_of
from cadenza.policies.inputs.trace import read_trace
from cadenza.policies.simulator.result_file import Saved, SavedRun, SweepPoint
from cadenza.policies.simulator.result_file import decode as decode_result
from cadenza.policies.simulator.result_file import encode as encode_result
from cadenza.policies.simulator.run_values import Sample
from cadenza.sidecar import agent_settings, bounds, frames, orders, wire
from cadenza.sidecar.agent.errors import StateFileError
from cadenza.sidecar.agent.ipc import messages
from cadenza.sidecar.agent.ipc.pages import read_record
from cadenza.sidecar.agent.jobs.step_rate import between
from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.agent.state_files import LeaseFile
from cadenza.sidecar.agent.telemetry.collector import Stretch, joined
from cadenza.sidecar.config import ConfigError
from cadenza.slurm_plugin.cli.main import main as cadenza
from cadenza.slurm_plugin.gateway import slurm_json
from cadenza.slurm_plugin.gateway.comment import BadOptions, opt_in_of
from cadenza.slurm_plugin.gateway.translate import snapshot
from cadenza.slurm_plugin.history.as_it_was import read_history
from cadenza.slurm_plugin.history.cluster_nodes import Hosts, read_hosts, with_lanes
from cadenza.slurm_plugin.history.job_records import read_job_records
from cadenza.slurm_plugin.history.queue_answer import read_queue
from cadenza.slurm_plugin.service.agents.agent_registry import AgentRegistry
from cadenza.slurm_plugin.service.credentials import Question
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.simulations.first_decision import as_if_managed, hidden_gpus
from cadenza.slurm_plugin.simulations.watch_record import add, begin
from cadenza.slurm_plugin.simulations.watch_view import Look
from cadenza.slurm_plugin.site.lane_plan import decode_nodes, lacking, plan_lanes
from cadenza.slurm_plugin.sweep.configs import read_request
from cadenza.slurm_plugin.sweep.controller import read_head
from cadenza.slurm_plugin.sweep.journal import Reports, TrialState, read_state

TESTS = Path(__file__).resolve().parents[2] / "tests"
ANSWERS, CLUSTER = TESTS / "cli", TESTS / "gateway" / "data" / "both-26.05"
"""Folders of recorded answers of Slurm's commands."""
ACCOUNTS = b"""JobIDRaw|User|Partition|Submit|Start|End|AllocTRES|ReqTRES|Suspended|NodeList|Constraints|SubmitLine
1|a|shared|9|9|99|cpu=1,gres/gpu:a100=2,gres/gpu=2,mem=1.5G|gres/gpu=2|00:00:05|node[1-2]|a100|b|sbatch --gres=gpu:2 x|y
"""
"""A table of sacct -P, with bars in its last columns."""
USAGE = 2
COMMAND_EVERY = 1000
"""Refused files of which one is given to its command."""
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 0.5, -0.0, 1e300, -1e300, 5e-324, 1e-9, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**62, 2**63 - 1,
    2**63, 2**64, 10**400, -(10**400), float("inf"), float("-inf"), float("nan"), True, False, None,
)  # fmt: skip
TEXTS = (
    "", "x", "\ud800", "\udfff", "\x00", "a\nb", "\x1b]0;x\x07", "\u202e", "\u2028", "\ufeff", "é", "[/]", "../..",
    "x" * 300, "x" * 5000, "nan", "inf", "1e999", "9" * 5000, "-1", "٣", "1_0", "0x1", "true", "null",
)  # fmt: skip
PIECES = (
    *TEXTS, "\r", "\r\n", ",", ",,", '"', "'", ":", "=", "-", "/", "{", "}", "[", "]", "[[", " ", "\t", "#", "{}",
    "NaN", "Infinity", "\\ud800", "\\u0000", "[" * 3000, '{"a":' * 3000, "1" * 400, "1e400",
)  # fmt: skip
WORDS = (0, 1, 2, 2**31, 2**45, 2**53, 2**62, 2**63, 2**64 - 1)


@dataclass
class Boundary:
    """A decoder with what it may raise, good inputs, and the command that takes such a file."""

    name: str
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    good: tuple[bytes, ...]
    command: Callable[[Path], list[str]] | None = None
    suffix: str = ""
    make: Callable[[random.Random, bytes], bytes] | None = None
    """Changes an input; the default is ``changed``."""
    inputs: int = 0
    refused: int = 0
    commands: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


# --- inputs ----------------------------------------------------------------------------------------------------


def changed(chance: random.Random, good: bytes) -> bytes:
    """Return an input with one to three changes: of its values if it is JSON, of its text, or of its bytes."""
    if not chance.randrange(20):
        return chance.randbytes(chance.randrange(40))
    data, values = good, list(_values(good))
    if values and chance.random() < 0.6:  # noqa: PLR2004
        at = chance.randrange(len(values))
        for _ in range(chance.randint(1, 3)):
            values[at] = _with_other_value(chance, values[at])
        ascii_only = chance.random() < 0.9  # noqa: PLR2004
        lines = [json.dumps(value, ensure_ascii=ascii_only) + "\n" * (len(values) > 1) for value in values]
        data = "".join(lines).encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((0, 0, 1)) if data is not good else chance.randint(1, 2)):
        begin = chance.randint(0, len(data))
        end = min(begin + chance.randint(0, 12), len(data))
        data = data[:begin] + chance.choice(PIECES).encode("utf-8", "surrogatepass") + data[end:]
    return data[: chance.randint(0, len(data))] if not chance.randrange(20) else data


@cache
def _values(good: bytes) -> tuple[Any, ...]:
    """Return the JSON values of an input, one a line; empty for an input in another language."""
    try:
        return tuple(json.loads(line) for line in good.splitlines())
    except ValueError:
        return ()


def _with_other_value(chance: random.Random, value: Any) -> Any:
    """Return a JSON value in which one part is another one, missing, or under another name."""
    if isinstance(value, dict) and value and chance.random() < 0.9:  # noqa: PLR2004
        name, action = chance.choice(list(value)), chance.randrange(8)
        rest = {key: one for key, one in value.items() if key != name}
        if action == 0:
            return rest
        if action == 1:
            return {**value, chance.choice(TEXTS): _hostile(chance, 2)}
        return {**value, name: _with_other_value(chance, value[name])}
    if isinstance(value, list) and value and chance.random() < 0.8:  # noqa: PLR2004
        at = chance.randrange(len(value))
        if not chance.randrange(8):
            return value * chance.choice((0, 2, 40))
        return [*value[:at], _with_other_value(chance, value[at]), *value[at + 1 :]]
    return _hostile(chance, 3)


def _hostile(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(5 if depth else 4)
    if kind < 2:  # noqa: PLR2004
        return chance.choice(NUMBERS)
    if kind < 4:  # noqa: PLR2004
        return chance.choice(TEXTS)
    inner = [_hostile(chance, depth - 1) for _ in range(chance.randrange(3))]
    return inner if chance.randrange(2) else {chance.choice(TEXTS): one for one in inner}


def page_words(chance: random.Random, _good: bytes) -> bytes:
    """Return two records of a page, one after the other, in words at the edges or at random."""
    words = array("Q", [chance.choice(WORDS)]) * (wire.PAGE_BYTES // 8)
    pages = b""
    for _ in range(2):
        for _ in range(chance.randrange(40)):
            at = chance.choice((chance.randrange(64), chance.randrange(len(words))))
            words[at] = chance.choice((*WORDS, chance.getrandbits(64)))
        words[wire.PAGE_LAYOUT] = chance.choice((0, 1, 2**64 - 1))
        pages += words.tobytes()
    return pages


# --- decoders, and the first code behind them ------------------------------------------------------------------


def page(data: bytes) -> object:
    """Return the telemetry and pace of two records of a page, within the bounds of a report."""
    records = [read_record(array("Q", data[at : at + wire.PAGE_BYTES])) for at in (0, wire.PAGE_BYTES)]
    told = joined(5.0, None, [Stretch(None, records[0]), Stretch(records[0], records[1])])
    pace = between(*records)
    msgspec.convert([pace.iteration_s, pace.error, pace.data_wait], list[bounds.Seconds])
    msgspec.convert(pace.iterations, bounds.Step)
    if msgspec.json.decode(msgspec.json.encode(told), type=orders.JobTelemetry) != told:
        raise AssertionError("the telemetry is not what the service reads")
    return told


def report(data: bytes) -> object:
    """Return an agent's message, and the events that follow from a report."""
    message, _ = frames.FROM_AGENT.decode(data)
    if isinstance(message, orders.Report):
        AgentRegistry(6.0).update(message, 1e9, 1e3)
    return msgspec.json.decode(msgspec.json.encode(message), type=orders.FromAgent)


def packet(data: bytes) -> object:
    """Return a job's message; it can be written to the log, to disk and to the service."""
    return msgspec.json.encode(messages.parse(data))


def order(data: bytes) -> object:
    """Return an order of the service."""
    return msgspec.json.encode(frames.TO_AGENT.decode(data)[0])


def file_of(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """Return the decoder of a file's content."""

    def decode(data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return decode


def sweep_reports(path: Path) -> object:
    """Return what a job's report file says; lines that are no reports are skipped."""
    trial = TrialState(1, {})
    return Reports(path.parent.parent).read([trial]), trial.best("max"), trial.curve()


def queue(data: bytes) -> object:
    """Return the cluster of what squeue prints; jobs that are none are left out."""
    return snapshot({"time_s": 1e9, "slurmctld_start_time": 1e9, "jobs": slurm_json.read_jobs(data)[0], "nodes": []})


def cluster(data: bytes) -> object:
    """Return the cluster of what scontrol prints of its nodes."""
    return snapshot({"time_s": 1e9, "slurmctld_start_time": 1e9, "jobs": [], "nodes": slurm_json.read_nodes(data)[0]})


def watched(data: bytes) -> object:
    """Return what a watch makes of what squeue or scontrol prints, whichever of the two it is."""
    text = data.decode(errors="replace")
    hosts = read_hosts(text, "F") if '"nodes"' in text[:20] else live_hosts()
    jobs = read_queue(text, "F", hosts.site).jobs if '"jobs"' in text[:20] else ()
    look = Look(1e9, "c", "none", hosts, jobs)
    add(begin("c", None, 1e9), 1e9 + 60.0, jobs, look.idle_waiting)
    return as_if_managed(jobs, hosts, hidden_gpus(jobs, hosts), 1e9, look.site)


@cache
def live_hosts() -> Hosts:
    """Return the hosts of a recorded answer."""
    return read_hosts((ANSWERS / "scontrol_node_live_26_05.json").read_text(), "F")


def accounting(data: bytes) -> object:
    """Return the past of an accounting, on nodes whose features are known."""
    hosts = live_hosts()
    records = read_job_records(text_in(data, "F"), "F")
    return read_history(records, with_lanes(hosts.nodes, 2), None, features=hosts.features)


def planned(data: bytes) -> object:
    """Return the lines of setup for the nodes that scontrol prints, with a gres.conf of the same bytes."""
    text = data.decode(errors="replace")
    nodes, _ = decode_nodes(text)
    plan = plan_lanes(nodes, {}, sorted({name for node in nodes for name in node.partitions}), 2, ())
    lines = [*plan.slurm_conf(), *plan.gres_conf("NodeName=node1 Name=gpu " + text)]
    if any(len(line.splitlines()) > 1 for line in plan.slurm_conf()):
        raise AssertionError("a line of slurm.conf is more than one")
    return lines, [*lacking(plan, nodes)]


def one_each(path: Path, kind: str) -> tuple[bytes, ...]:
    """Return the jobs or nodes of an answer of Slurm, each as an answer of its own without its empty fields."""
    records = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))[kind]
    full = ({name: value for name, value in one.items() if value} for one in records)
    texts = (json.dumps({kind: [one]}, ensure_ascii=False, separators=(",", ":")) for one in full)
    return tuple(text.encode("utf-8", "surrogateescape") for text in texts)


# --- boundaries ------------------------------------------------------------------------------------------------


def of_wire() -> list[Boundary]:
    """Return the boundaries between jobs, agents and the service."""
    lease = orders.LeaseReport(
        1, 0, 1000, "n1", (0, 1), "held", managed=True, vtime_s=1.5, held_s=1.0, since_s=1e9, ranks=2, world_size=2,
        hosts=1, ready=True, note="", telemetry=orders.JobTelemetry(window_s=5.0, iterations=3), lost="",
    )  # fmt: skip
    facts = orders.JobFacts(1, 0, managed=True, weight=1.0, priority=0, user="u", hosts=1, pack=1)
    encode = msgspec.json.encode
    return [
        Boundary(
            "packets of jobs", packet, (wire.WireError,),
            (
                wire.encode("start", job=1, uid=1000, user="u", node="n1", managed=True, gpus=[0, 1], step=4294967291),
                wire.encode("attach", job=1, restart=0, rank=0, world_size=2, gpus=[0], node="n1", state="running"),
                wire.encode("arrived", order=7, step=3, bytes=9, refused=""),
                wire.encode("yielded", order=7, copy_s=0.5, bytes=9, resident=["a"], error=""),
                wire.encode("checkpointed", order=7, step=3, bytes=9, seconds=0.5, paths=["/p"], error=""),
                wire.encode("detach", reason="r"), wire.encode("requeued_by", owner="lightning"),
                wire.encode("end", job=1, restart=0), wire.encode("resumed", order=7, copy_s=0.1),
            ),
        ),
        Boundary("pages of ranks", page, (), (b"",), make=page_words),
        Boundary(
            "orders of the service", order, frames.ERRORS,
            (
                encode(orders.Facts(1, (facts,), 60.0, share_between_users=False, enforce=True)),
                encode(orders.YieldOrder(1, 1, 0, 30.0)), encode(orders.CheckpointOrder(1, 1, 0, 30.0, 900.0, 60.0)),
                encode(orders.Tune(1, 1, 0, 2.5, 1000, 10)), encode(orders.PrefetchOrder(1, 1, 0, 1000, ("/a", "/b"))),
                encode(orders.StopAt(1, 1, 0, 9)), encode(orders.CancelOrder(1, 1, 0, "r")),
            ),
        ),
        Boundary(
            "reports of agents", report, frames.ERRORS,
            (
                encode(orders.Report(1, "n1", "1", 100, 50, rotating=False, at_s=1e9, leases=(lease, lease),
                                     lacks=("l",), faults=("f",), prefetched=(orders.Prefetched(1, 0, 2, 3, 0.5),))),
                encode(orders.Switched(1, "n1", 1, 0, "yield", 1e9, 0.1, 0.1, 0.2, 5, note="n")),
                encode(orders.Steps(1, "n1", 1, 0, 5, arrived=True)),
                encode(orders.LeaseLog(1, "n1", 1, 0, (0,), 1e9, 1e9 + 5)),
                encode(orders.Files(1, "n1", 1, 0, ("/a",))),
            ),
        ),
        Boundary(
            "questions of users", lambda data: encode(msgspec.json.decode(data, type=Question)), frames.ERRORS,
            (encode(Question(b'{"job":1}', munge="MUNGE:AwQF+/=:")), encode(Question(b"{}", token="a.b.c_-"))),  # noqa: S106
        ),
        Boundary("jobs of Slurm's JSON", queue, (slurm_json.NotSlurms,), one_each(CLUSTER / "jobs.json", "jobs")),
        Boundary("nodes of Slurm's JSON", cluster, (slurm_json.NotSlurms,), one_each(CLUSTER / "nodes.json", "nodes")),
        Boundary(
            "comments of jobs", lambda data: opt_in_of(data.decode("utf-8", "surrogatepass")),
            (BadOptions, UnicodeDecodeError),  # the latter is this program's own: Slurm has bytes in UTF-8
            (
                b'{"cadenza":{"v":1,"share":true,"min_gpus":1,"max_gpus":4,"model":"res18","priority":0}}',
                b'{"a":1,"cadenza":{"share":true,"batch":"global","iterations":5,"duration_s":60,"why":"w"}}',
            ),
        ),
    ]  # fmt: skip


def of_files(folder: Path) -> list[Boundary]:
    """Return the boundaries whose inputs are files."""
    toml = b'[service]\nmode = "observe"\npoll_s = 5\n[guard]\npartitions = ["gpu"]\n[expert]\nheartbeat_s = 2.0\n'
    trace = b"job,submit_s,gpus,model,iterations,user,min_gpus\n1,0,1,gnmt,5,a,1\n2,7.5,8,m5,5,,\n"
    published = json.loads(text_of("synergy.json"))
    profiles = json.dumps({**published, "profiles": published["profiles"][:2]}).encode()
    ran = SavedRun(
        1, 9.0, {"jobs": 1}, (), (Sample(0.0, 1.0, 1.0, 1.0, 0.0, 1.0), Sample(1.0, 1.0, 1.0, 1.0, 0.0, 1.0))
    )
    point = SweepPoint(4.0, 1, 2.0, 0.5, stable=True)
    simulated = encode_result(Saved("a", ("--nodes", "1x1:1:1"), 1, 1, (ran,), (point,)))
    nodes = read_cluster("2x8:24:500")
    sweep = b'name = "s"\ngoal = "max"\n[grid]\nlr = [0.1, 0.2]\nwidth = [1, 2]\n'
    leases = LeaseFile(folder, "boot", folder / "run")
    leases.write((Lease(1, 0, 1000, (0,), 1e9, user="u", processes=(Process(1, 2),)),), None)
    saved = leases.path.read_bytes()
    (folder / "reports").mkdir()
    head = b'{"id":"a","plan":{"name":"s"},"words":["job.sh"],"folder":"/tmp"}'
    record = b'{"kind":"asked","trial":1,"config":{"lr":0.1},"key":null}\n{"kind":"live","trial":1,"job":5}\n'
    reports = b'{"step":1,"value":0.5,"time_s":9}\n{"step":2,"value":0.6,"time_s":10}\n'
    inputs = (InputError,)
    of_sweeps = (InputError,)
    return [
        Boundary(
            "settings of the service", file_of(folder, "service.toml", load_settings), (ConfigError,), (toml,),
            lambda path: ["config", "--check", str(path)], ".toml",
        ),
        Boundary(
            "settings of an agent", file_of(folder, "agent.toml", agent_settings.load_settings), (ConfigError,), (toml,)
        ),
        Boundary(
            "accounting of Slurm",
            accounting, inputs, ((ANSWERS / "sacct_26_05.json").read_bytes(), ACCOUNTS),
            lambda path: ["whatif", "--sacct", str(path), "--nodes", "1x1:1:1"], ".json",
        ),
        Boundary(
            "nodes of Slurm", lambda data: with_lanes(read_hosts(text_in(data, "F"), "F").nodes, 2), inputs,
            ((ANSWERS / "scontrol_node_26_05.json").read_bytes(),),
        ),
        Boundary(
            "queue of a watch", watched, inputs,
            (
                *one_each(ANSWERS / "squeue_26_05.json", "jobs"),
                *one_each(ANSWERS / "scontrol_node_live_26_05.json", "nodes"),
            ),
        ),
        Boundary(
            "nodes of setup", planned, inputs, ((ANSWERS / "scontrol_node_26_05.json").read_bytes(),),
        ),
        Boundary(
            "traces", lambda data: read_trace(text_in(data, "F"), "F", synergy_profiles()), inputs, (trace,),
            lambda path: ["simulate", "--trace", str(path), "--nodes", "1x1:1:1"], ".csv",
        ),
        Boundary(
            "profiles", lambda data: read_profiles(text_in(data, "F"), "F"), inputs, (profiles,),
            lambda path: ["profile", "show", str(path)], ".json",
        ),
        Boundary(
            "costs, failures, pairs", lambda data: _tables(text_in(data, "F"), nodes), inputs,
            (b"start_s = 1\ncopy_gb_s = 10.5\n", b"node,start_s,end_s\nn0001,0,5\nn0002,1e3,2e3\n",
             b"model,other,speed,other_speed\na,b,0.5,1\n"),
        ),
        Boundary(
            "saved simulations", lambda data: decode_result(data, "F"), inputs,
            (simulated,), lambda path: ["report", str(path)], ".json",
        ),
        Boundary(
            "plans of sweeps", file_of(folder, "sweep.toml", read_request), of_sweeps, (sweep,),
            lambda path: ["sweep", "run", str(path), "--", "job.sh"], ".toml",
        ),
        Boundary("heads of sweeps", file_of(folder, "sweep.json", lambda _: read_head(folder)), of_sweeps, (head,)),
        Boundary("journals of sweeps", file_of(folder, "journal.jsonl", lambda _: read_state(folder)), of_sweeps,
                 (record,)),
        Boundary("reports of sweeps", file_of(folder / "reports", "1.jsonl", sweep_reports), (), (reports,)),
        Boundary("leases on disk", file_of(folder, "leases.json", lambda _: leases.read()), (StateFileError,),
                 (saved,)),
    ]  # fmt: skip


def _tables(text: str, nodes: Any) -> object:
    """Return what the reader that fits the first line makes of a table."""
    if text.startswith("node"):
        return read_failures(text, "F", nodes)
    return read_interference(text, "F") if text.startswith("model") else read_costs(text, "F")


# --- the run ---------------------------------------------------------------------------------------------------


def attempt(boundary: Boundary, seed: int, number: int, folder: Path) -> None:
    """Push one input through a boundary, and note a fault."""
    chance = random.Random(f"{seed} {boundary.name} {number}")
    data = (boundary.make or changed)(chance, chance.choice(boundary.good))
    boundary.inputs += 1
    try:
        boundary.decode(data)
    except boundary.errors:
        boundary.refused += 1
        if boundary.command is not None and boundary.refused % COMMAND_EVERY == 1:
            _try_command(boundary, data, number, folder)
    except Exception:  # noqa: BLE001 - any other error is what is looked for
        boundary.faults.append(f"{boundary.name} {number}: {data[:300]!r}\n{traceback.format_exc(limit=-4)}")


def _try_command(boundary: Boundary, data: bytes, number: int, folder: Path) -> None:
    """Give a refused file to its command, and note an exit code that is not 2."""
    path = folder / f"bad{boundary.suffix}"
    path.write_bytes(data)
    arguments = boundary.command(path) if boundary.command else []
    result = CliRunner().invoke(cadenza, arguments)
    boundary.commands += 1
    if result.exit_code != USAGE:
        told = f"exit code {result.exit_code} of cadenza {' '.join(arguments)}: {result.output[-300:]}"
        boundary.faults.append(f"{boundary.name} {number}: {data[:300]!r}\n{told}")


def run(count: int, seed: int = 1, first: int = 0, only: str = "") -> list[Boundary]:
    """Return the boundaries after ``count`` inputs, divided evenly, from the input with the number ``first`` on."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:  # noqa: S108
        boundaries = [one for one in (*of_wire(), *of_files(Path(made))) if only in one.name]
        for boundary in boundaries:
            for good in boundary.good if boundary.make is None else ():
                boundary.decode(good)
            began = time.perf_counter()
            for number in range(first, first + -(-count // len(boundaries))):
                attempt(boundary, seed, number, Path(made))
            boundary.seconds = time.perf_counter() - began
    return boundaries


def main() -> int:
    """Run, print a table and the faults, and return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs, over all decoders")
    parser.add_argument("--only", default="", help="boundaries with this in their name")
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to repeat a fault")
    options = parser.parse_args()
    boundaries = run(options.count, options.seed, options.first, options.only)
    print(f"{'boundary':<24}{'inputs':>9}{'refused':>9}{'commands':>10}{'µs each':>9}{'faults':>8}")
    for one in boundaries:
        each_us = 1e6 * one.seconds / max(one.inputs, 1)
        print(f"{one.name:<24}{one.inputs:>9}{one.refused:>9}{one.commands:>10}{each_us:>9.0f}{len(one.faults):>8}")
    faults = [fault for one in boundaries for fault in one.faults]
    print(f"{sum(one.inputs for one in boundaries)} inputs, seed {options.seed}: {len(faults)} faults")
    for fault in faults[:20]:
        print(f"\n{fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
