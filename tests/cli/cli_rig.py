"""Shared parts of the commands' tests: a store filled by real rounds, and Slurm's side in a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from cadenza.policies.core.actions import Action, Outcome, Suspend, Yield
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Host, Job, JobKey, Lease, LeaseState, Node, Options
from cadenza.policies.guard import GuardSettings
from cadenza.policies.round import run_round
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Switched
from cadenza.slurm_plugin.service.settings import Settings, load_settings, to_record
from cadenza.slurm_plugin.service.store.record_codec import decode_snapshot, encode_snapshot
from cadenza.slurm_plugin.service.store.writer import SqliteStore

SNAPSHOT_FILE = "CADENZA_CLI_TEST_SNAPSHOT"


class FileGateway:
    """A gateway over one snapshot in a file; its actions go to a log file next to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path.with_suffix(".log")

    def read(self) -> ClusterSnapshot:
        return decode_snapshot(self.path.read_bytes())

    def apply(self, action: Action) -> Outcome:
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"{type(action).__name__} {getattr(action, 'job', '')}\n")
        return Outcome(ok=True)

    def close(self) -> None:
        pass


def connect() -> FileGateway:
    """Return the gateway that ``[service] gateway`` names in these tests."""
    return FileGateway(Path(os.environ[SNAPSHOT_FILE]))


def job(number: int, name: str, lease: LeaseState | None, **changes: object) -> Job:
    """Return a job on the two GPUs of n1; the lane follows from its number."""
    node = "n1" if number % 2 else "n1-l1"
    base = Job(
        key=JobKey(number, 0), user="ada", account="lab", partition="gpu", qos="normal", state="RUNNING",
        gpus=2, cpus=4, memory_mb=1000, num_nodes=1, submit_s=0.0, name=name, start_s=1.0, slurm_priority=1,
        nodes=(node,), options=Options(),
        lease=lease and Lease(lease, (Gpu("n1", 0), Gpu("n1", 1)), 30.0, ready=True, iteration_s=0.03, step=700),
    )  # fmt: skip
    return replace(base, **changes)


def cluster(*jobs: Job) -> ClusterSnapshot:
    """Return one host with two GPUs and two lanes."""
    lanes = tuple(Node(name, "n1", lane, 8, 16000, 2, "a100", ("gpu",)) for lane, name in enumerate(("n1", "n1-l1")))
    return ClusterSnapshot(SystemClock().now(), lanes, jobs, (Host("n1", True, "0.1.0", 64000, 60000),))


def write_config(folder: Path, more: str = "") -> Path:
    """Write a configuration file whose store, keys and gateway are the test's."""
    path = folder / "cadenza.toml"
    path.write_text(
        f'expert.kill_switch = "{folder}/STOP"\n'
        f'[service]\nstore = "{folder}/cadenza.db"\nkeys = "{folder}/keys"\ngateway = "cli_rig:connect"\n'
        f'{more}\n[guard]\npartitions = ["gpu"]\n'
    )
    return path


def fill(config: Path, snapshot: ClusterSnapshot, *, apply: bool) -> Settings:
    """Run one real round over ``snapshot`` in which job 1 is asked to yield and job 2 is suspended."""
    settings = load_settings(config)
    clock = SystemClock()
    store = SqliteStore(Path(settings.service.store), clock)
    store.use_settings(to_record(settings))
    file = config.with_name("snapshot.json")
    file.write_bytes(encode_snapshot(snapshot))
    decision = Decision(
        (Yield(JobKey(1, 0), "job 2 is next on n1:gpu0-1"), Suspend(JobKey(2, 0), "it waits for its turn")),
        Memory(),
        {JobKey(1, 0): "its turn ends: job 2 is next on n1:gpu0-1"},
    )
    guard = GuardSettings(enforce=apply, partitions=frozenset({"gpu"}), min_run_s=0.0)
    run_round(FileGateway(file), clock, store, lambda _snapshot, _memory: decision, guard)
    store.record([Switched(VERSION, "n1", 1, 0, "yield", clock.now(), 0.021, 0.001, 0.025, 4_000_000, 0.031, "")])
    store.close()
    return settings
