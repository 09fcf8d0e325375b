"""Hostile comments and names through everything behind their decoder, and back out of the store."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.core.actions import Action, Outcome
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, Options
from cadenza.policies.registry import ENTRIES
from cadenza.policies.round import Live, run_round
from cadenza.policies.supervision import left_alone
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.report_command import show
from cadenza.slurm_plugin.gateway.comment import BadOptions, opt_in_of
from cadenza.slurm_plugin.gateway.translate import snapshot
from cadenza.slurm_plugin.report.sheet import render
from cadenza.slurm_plugin.service.agent_facts import facts_of, suspended_after
from cadenza.slurm_plugin.service.observe.enrichment import with_profiles, with_progress
from cadenza.slurm_plugin.service.profiles.library import Library
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, policy, to_record
from cadenza.slurm_plugin.service.store import schema
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore
from cadenza.slurm_plugin.terminal import Terminal
from cadenza.slurm_plugin.views.cluster_view import Recent, build
from cadenza.slurm_plugin.views.job_sentences import lines
from cadenza.slurm_plugin.views.sharing_sheet import gather, sheet, summary
from cadenza.slurm_plugin.views.top_screen import Screen

RECORDING = Path(__file__).parents[1] / "gateway" / "data" / "slurm-26.05.jsonl"
CLUSTER = [json.loads(line) for line in RECORDING.read_text(encoding="utf-8").splitlines()][1]
"""Jobs of a real cluster that run, are suspended, wait and are held, most of them opted in."""
BAD, HONEST = (32, 34, 37), (33, 35, 39)
"""Jobs whose owners are hostile, and jobs whose owners are not: a suspended, a running and a held job each."""
NAMES = {kind: [one.name for one in ENTRIES if one.kind == kind] for kind in ("ordering", "allocation", "sharing")}

# --- Hostile values ------------------------------------------------------------------------------------

EDGES = [0, 1, -1, *(sign * 2**bits + more for sign in (1, -1) for bits in (31, 63, 64) for more in (-1, 0, 1))]
NUMBERS = (*EDGES, 10**400, float("inf"), float("-inf"), float("nan"), 1e308, 0.5, 65535, 65536, 10**6, 2 * 10**9)
TEXTS = (
    "\ud800", "\udfff\ud800", "\x00", "\x1b[2J", "\x1b]0;x\x07", "a\nb", "\u202etxt.exe", "\u2066", "[/]", "[link=x]y",
    "\uffff", "\U0010ffff", "x" * 5000, "", "res18", "{", '"cadenza"',
)  # fmt: skip
NESTED = (
    "[" * 5000, "[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400, "[" + "1," * 5000 + "1]",
    "{" + ",".join(f'"k{n}":{n}' for n in range(2000)) + "}",
)  # fmt: skip
ENCODED = (*map(json.dumps, (*NUMBERS, *TEXTS)), *NESTED, "true", "false", "null", "nul", "1e999")
VALUES = st.sampled_from(ENCODED)
OPTIONS = (
    "v", "share", "min_gpus", "max_gpus", "batch", "model", "priority", "iterations", "duration_s", "held", "why",
)  # fmt: skip
KEYS = st.one_of(st.sampled_from(OPTIONS).map(json.dumps), st.sampled_from(TEXTS).map(json.dumps))
OBJECTS = st.lists(st.tuples(KEYS, VALUES), max_size=4).map(
    lambda row: "{" + ",".join(f"{k}:{v}" for k, v in row) + "}"
)
COMMENTS = st.one_of(
    OBJECTS.map(lambda value: f'{{"cadenza":{value}}}'),
    st.tuples(OBJECTS, VALUES).map(lambda pair: f'{{"x":{pair[1]},"cadenza":{pair[0]}}}'),
    VALUES.map(lambda value: f'{{"cadenza":{value}}}'),
    st.sampled_from(TEXTS).map(lambda text: f"cadenza {text}"),
    st.sampled_from([
        '{"cadenza":{"min_gpus":65535,"max_gpus":65535,"priority":1000000}}',
        '{"cadenza":{"iterations":2000000000,"duration_s":2000000000,"priority":-1000000}}',
        '{"cadenza":{"iterations":1,"duration_s":1,"min_gpus":1,"max_gpus":1}}',
        '{"cadenza":{"held":true}}',
    ]),
)  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(COMMENTS)
def test_the_decoder_of_the_comment_has_one_error(comment: str) -> None:
    is_refused_or_within_bounds(comment)


@pytest.mark.parametrize("key", [*OPTIONS, "\ud800", "x" * 3000])
def test_the_decoder_takes_every_value_of_every_option(key: str) -> None:
    for value in ENCODED:
        is_refused_or_within_bounds(f'{{"cadenza":{{{json.dumps(key)}:{value}}}}}')


def is_refused_or_within_bounds(comment: str) -> None:
    refusal = ""
    try:
        found = opt_in_of(comment)
    except BadOptions as error:
        found, refusal = None, str(error)
    assert refusal.isprintable()
    assert len(refusal) < 300
    if found is not None:
        assert msgspec.json.decode(msgspec.json.encode(found.options), type=Options) == found.options
        assert found.reason.isprintable()


# --- Everything behind it ------------------------------------------------------------------------------


def observed(comments: dict[int, str], name: str) -> ClusterSnapshot:
    """The real cluster with these comments, names that are hostile too, and a lease for every started job."""
    jobs = [dict(raw) for raw in CLUSTER["jobs"]]
    for raw in jobs:
        if raw["id"] in comments:
            raw |= {"comment": comments[raw["id"]], "name": name, "command": f"/home/{name}", "account": name}
    base = snapshot(CLUSTER | {"jobs": jobs})
    hosts = tuple(Host(each, agent_alive=True) for each in sorted({node.host for node in base.nodes}))
    base = replace(base, jobs=tuple(map(leased, base.jobs)), hosts=hosts)
    earlier = with_progress(replace(base, time_s=base.time_s - 5000), None)
    return with_progress(with_profiles(base, Library(), {}, {}), earlier)


def leased(job: Job) -> Job:
    if not job.nodes:
        return job
    state = "yielded" if job.state == "SUSPENDED" else "held"
    gpus = tuple(
        Gpu(name.partition("-l")[0], index) for name in job.nodes for index in range(job.gpus // len(job.nodes))
    )
    lease = Lease(state, gpus, held_s=90.0 if state == "held" else 0.0, ready=True, step=7, checkpoints=True)
    return replace(job, lease=lease)


def configured(order: str, allocate: str, share: str, *, place: bool) -> Settings:
    tables = {
        "service": {"mode": "apply"},
        "guard": {"partitions": ["shared"]},
        "expert": {"kill_switch": "/nonexistent/STOP"},
        "policy": {"order": order, "allocate": allocate, "share": share, "place": place},
        "sharing": {"share_between_users": True, "max_priority": 2**31},
    }
    return msgspec.convert(tables, Settings)


class Obedient:
    """A gateway over one snapshot, to which every action succeeds."""

    def __init__(self, seen: ClusterSnapshot) -> None:
        self.seen = seen

    def read(self) -> ClusterSnapshot:
        return self.seen

    def apply(self, action: Action) -> Outcome:
        del action
        return Outcome(ok=True)


def whole_way(seen: ClusterSnapshot, chosen: Settings, folder: Path) -> None:
    """Decide, guard, write down, reopen, and show a snapshot; nothing may raise, and no job may be the reason."""
    # 1. Two rounds, the second with the memory of the first.
    path = folder / "cadenza.db"
    path.unlink(missing_ok=True)
    store = SqliteStore(path, SystemClock())
    store.use_settings(to_record(chosen))
    ours = Memory(suspended=frozenset({JobKey(32, 0)}))
    store.adopt(ours)
    for later_s in (0.0, 30.0):
        rules = guard_settings(chosen)
        gateway = Obedient(seen.at(seen.time_s + later_s))
        report = run_round(gateway, SystemClock(), store, policy(chosen), rules, Live(lambda: rules, 60.0))  # noqa: B023
        assert report.left_alone == {}
    facts = facts_of(report.snapshot, chosen, suspended_after(report), store.memory())
    msgspec.json.encode(facts)
    store.close()
    # 2. It reads back.
    again = SqliteStore(path, SystemClock())
    assert again.last_snapshot() == report.snapshot
    again.close()
    schema.read_undo(path)
    # 3. Everything that shows it.
    screen_text = StringIO()
    console = Terminal(file=screen_text, width=200)
    with StoreReader(path) as reader:
        last = reader.round()
        assert last is not None
        assert (last.number, last.snapshot, last.decision) == (2, report.snapshot, report.decision)
        texts = [line for number in (*BAD, *HONEST) for line in lines(reader.job_record(number))]
        console.print(Screen(build(last, Recent(reader.actions(), (), reader.effects()), seen.time_s)))
        sharing = gather(reader, seen.time_s - 7200, seen.time_s + 7200, None)
    content = sheet(sharing, "t")
    show(content, summary(sharing), console)
    render(content).encode()
    assert all(text.isprintable() for text in texts)
    assert all(line.isprintable() for line in screen_text.getvalue().splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(COMMENTS, COMMENTS, COMMENTS),
    st.sampled_from(TEXTS),
    st.sampled_from(NAMES["ordering"]),
    st.sampled_from(NAMES["sharing"]),
    st.booleans(),
)
def test_no_comment_gets_past_its_decoder(
    comments: tuple[str, str, str], name: str, order: str, share: str, place: bool
) -> None:
    seen = observed(dict(zip(BAD, comments, strict=True)), name)
    with TemporaryDirectory() as folder:
        whole_way(seen, configured(order, "none", share, place=place), Path(folder))


EXTREME = {
    32: '{"cadenza":{"iterations":2000000000,"duration_s":2000000000,"priority":-1000000,"min_gpus":1}}',
    34: '{"cadenza":{"iterations":1,"duration_s":1,"min_gpus":65535,"max_gpus":65535,"priority":1000000}}',
    37: '{"cadenza":{"model":"' + "m" * 64 + '","max_gpus":1,"batch":"per-gpu"}}',
}


@pytest.mark.parametrize("share", NAMES["sharing"])
@pytest.mark.parametrize("order", NAMES["ordering"])
def test_every_policy_takes_the_extremes_of_the_options(order: str, share: str, folder: Path) -> None:
    seen = observed(EXTREME, "x\ud800\x1b[2J")
    whole_way(seen, configured(order, "none", share, place=True), folder)


@pytest.mark.parametrize("allocate", NAMES["allocation"])
def test_every_allocation_takes_the_extremes_of_the_options(allocate: str, folder: Path) -> None:
    for share, place in product(("none", "gandiva"), (False, True)):
        whole_way(observed(EXTREME, "x"), configured("srtf", allocate, share, place=place), folder)


@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize("allocate", ["none", "cadenza"])
@pytest.mark.parametrize("share", NAMES["sharing"])
def test_every_policy_says_that_a_job_is_left_alone(share: str, allocate: str, place: bool) -> None:
    seen = observed({}, "x")
    jobs = tuple(left_alone(job, "of its data") if job.key.id in BAD else job for job in seen.jobs)
    decision = policy(configured("fifo", allocate, share, place=place))(replace(seen, jobs=jobs), Memory())
    assert {decision.reasons[JobKey(number, 0)] for number in BAD} == {"left alone: of its data"}


# --- Authority -----------------------------------------------------------------------------------------

CLAIMS = {
    "held": {"comment": '{"cadenza":{"share":true,"held":true}}'},
    "held and out": {"comment": '{"cadenza":{"share":false,"held":true,"why":"x"}}'},
}


@pytest.mark.parametrize("mode", ["apply", "observe"])
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("partition", ["shared", "other"])
def test_nothing_that_a_user_writes_undoes_an_admins_hold(
    claim: dict[str, str], mode: str, partition: str, folder: Path
) -> None:
    """Jobs that an admin holds stay held, whatever they say of themselves."""
    changes = {"state_reason": "JobHeldAdmin", "partition": partition} | claim
    jobs = [raw | changes if raw["state"] == "PENDING" else raw for raw in CLUSTER["jobs"]]
    seen = snapshot(CLUSTER | {"jobs": jobs})
    for order, share in product(("fifo", "srtf"), NAMES["sharing"]):
        chosen = configured(order, "none", share, place=True)
        chosen = msgspec.structs.replace(chosen, service=msgspec.structs.replace(chosen.service, mode=mode))
        (folder / "cadenza.db").unlink(missing_ok=True)
        store = SqliteStore(folder / "cadenza.db", SystemClock())
        report = run_round(Obedient(seen), SystemClock(), store, policy(chosen), guard_settings(chosen))
        store.close()
        held = {job.key for job in seen.jobs if job.held}
        assert held
        touched = {getattr(action, "job", None) for action, _ in report.outcomes}
        assert held.isdisjoint(touched)


JOBS = [raw["id"] for raw in CLUSTER["jobs"]]
UNBELIEVED = st.fixed_dictionaries(
    {}, optional={"held": st.booleans(), "name": st.sampled_from(TEXTS), "command": st.sampled_from(TEXTS)}
)
"""Words of a job's owner that no daemon may act on: the comment's ``held``, the job's name and its command."""


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(JOBS), UNBELIEVED, min_size=1, max_size=4),
    st.sampled_from(NAMES["ordering"]),
    st.sampled_from(NAMES["sharing"]),
    st.booleans(),
)
def test_words_without_authority_change_no_action(
    claims: dict[int, dict[str, object]], order: str, share: str, place: bool
) -> None:
    """The same actions, byte for byte, in the recorded cluster with and without them."""

    def decided(claimed: dict[int, dict[str, object]]) -> bytes:
        jobs = [claiming(raw, dict(claimed.get(raw["id"], {}))) for raw in CLUSTER["jobs"]]
        seen = snapshot(CLUSTER | {"jobs": jobs})
        seen = replace(seen, jobs=tuple(map(leased, seen.jobs)))
        return msgspec.json.encode(policy(configured(order, "none", share, place=place))(seen, Memory()).actions)

    assert decided(claims) == decided({})


def claiming(raw: dict[str, object], claim: dict[str, object]) -> dict[str, object]:
    """Return a recorded job with another name and command, and with ``held`` in its comment if that is claimed."""
    comment = json.loads(str(raw["comment"])) if str(raw["comment"]).startswith("{") else {}
    if "held" in claim and "cadenza" in comment:
        claim["comment"] = json.dumps({"cadenza": comment["cadenza"] | {"held": claim.pop("held")}})
    claim.pop("held", None)
    return raw | claim
