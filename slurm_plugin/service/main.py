"""``cadenzad``: puts the service's parts together, and takes them down in order."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import click

from cadenza.policies.core.errors import CadenzaError
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError
from cadenza.sidecar.daemon_log import set_up_logging
from cadenza.sidecar.metrics_server import MetricsServer, new_registry
from cadenza.sidecar.orders import Ask
from cadenza.sidecar.sd_notify import notify
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.gateway import source_gateway
from cadenza.slurm_plugin.gateway.slurm_gateway import open_gateway
from cadenza.slurm_plugin.service.action_log import log_action
from cadenza.slurm_plugin.service.agents.curve_keys import service_pair
from cadenza.slurm_plugin.service.agents.hub import Hub
from cadenza.slurm_plugin.service.failover.controllers import Controllers
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.failover.release_round import release_unrecorded
from cadenza.slurm_plugin.service.failover.watchdog import Watchdog
from cadenza.slurm_plugin.service.loop import UNDONE_REASON, Loop, Parts
from cadenza.slurm_plugin.service.owner_socket import OwnerSocket
from cadenza.slurm_plugin.service.question_port import QuestionPort
from cadenza.slurm_plugin.service.settings import Settings, guard_settings, hub_settings, load_settings
from cadenza.slurm_plugin.service.store.schema import read_undo
from cadenza.slurm_plugin.service.store.writer import SqliteStore

log = logging.getLogger(__name__)

FAILED = 1
TAKE_OVER_S = 10.0
"""Longest wait of a new service for its predecessor's watchdog to finish an attempt."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config", type=click.Path(path_type=Path), default=DEFAULT_PATH, show_default=True, help="Configuration file."
)
@click.option("--once", is_flag=True, help="Run one round and end: 0 when it succeeded, else 1.")
@click.option("--seed", type=int, help="Seed of the poll's jitter (default: none, from the system).")
@click.option("--debug", is_flag=True, help="Log more, with tracebacks.")
@click.version_option(version("cadenza"), prog_name="cadenzad")
def main(*, config: Path, once: bool, seed: int | None, debug: bool) -> None:
    """The policy service: decides in rounds which job uses which GPU, and sends the actions to Slurm and the agents."""  # noqa: D401
    set_up_logging("cadenzad", debug=debug)
    try:
        settings = load_settings(config)
        sys.exit(serve(settings, config, once=once, seed=seed))
    except CadenzaError as error:
        if debug:
            log.exception("cadenzad cannot run")
        click.echo(f"cadenzad: {error}", err=True)
        sys.exit(error.exit_code)


def serve(settings: Settings, config: Path, *, once: bool, seed: int | None) -> int:
    """Run the service until SIGTERM, or one round; return the exit code."""
    table, clock = settings.service, SystemClock()
    hub = Hub(hub_settings(settings), clock)  # a service whose keys are wrong leaves nothing behind
    log.info("cadenzad %s MODE=%s", version("cadenza"), table.mode)
    with ExitStack() as stack:
        # 1. The lock: one service for each store.
        lock = StoreLock(Path(table.store))
        lock.take(TAKE_OVER_S)
        stack.callback(lock.release)
        # 2. The store, Slurm, the agents, and the loop over them.
        store = _opened_store(settings, clock)
        stack.callback(store.close)
        slurm = open_gateway(table.gateway)
        stack.callback(slurm.close)
        hub.start()
        stack.callback(hub.close)
        log.info("listening for agents on %s", hub.address)
        parts = Parts(slurm, hub, store)
        loop = Loop(settings, parts, clock, Random(seed))  # noqa: S311 (jitter, not secrets)
        if once:
            loop.settle()
            return 0 if loop.round() else FAILED
        if isinstance(slurm, source_gateway.SlurmGateway):
            loop.standby_reason = Controllers(socket.gethostname()).standby_reason
        # 3. The watchdog, which releases our jobs if this process is killed.
        watchdog = Watchdog(Path(table.store), table.gateway, settings.expert.watchdog_grace_s)
        watchdog.start()
        # 4. The socket at which users read the record of their own jobs; for those of other machines agents ask, or
        # they do themselves at a port.
        owners = OwnerSocket(Path(settings.expert.jobs_socket), Path(table.store), clock)
        owners.start()

        def answer(asked: Ask, here: frozenset[str] | None) -> None:
            if loop.acting:  # else the other controller's service answers
                owners.relay(asked, here, lambda told: hub.send([(asked.host, told)]))

        hub.on_ask = answer
        stack.callback(owners.close)
        if settings.expert.question_port:
            interface = table.bind.rpartition(":")[0]  # that of the agents' link
            port = QuestionPort(
                f"{interface}:{settings.expert.question_port}",
                service_pair(Path(table.keys)),
                lambda uid, line: owners.of_credential(uid, line) if loop.acting else None,
                clock,
            )
            port.start()
            stack.callback(port.close)
        # 5. The figures for Prometheus.
        if table.metrics:
            try:
                stack.callback(_metrics_server(loop, parts).close)
            except ConfigError as error:  # jobs need no metrics
                log.error("no metrics: %s", error)  # noqa: TRY400 - the message is complete
        # 6. Rounds until a signal, then an orderly end.
        _run(loop, config, watchdog)
    return 0


def _metrics_server(loop: Loop, parts: Parts) -> MetricsServer:
    """Return the running server of ``/metrics``, fed by the loop; raise ConfigError if it cannot be had."""
    registry = new_registry("service.metrics")
    from cadenza.slurm_plugin.service.metrics.cluster_gauges import ClusterGauges, Sources  # noqa: PLC0415 - an extra
    from cadenza.slurm_plugin.service.metrics.round_metrics import RoundMetrics  # noqa: PLC0415

    metrics = RoundMetrics(registry)
    loop.on_round, loop.on_failure, loop.on_messages = metrics.ended, metrics.failed, metrics.messages
    greeting: dict[str, Any] = {}
    if isinstance(parts.slurm, source_gateway.SlurmGateway):
        parts.slurm.asked = metrics.asked
        with suppress(CadenzaError):  # a Slurm that does not answer now is no reason to have no metrics
            greeting = parts.slurm.greeting()
    sources = Sources(
        {
            "version": version("cadenza"),
            "slurm": str(greeting.get("scontrol", greeting.get("pyslurm", ""))),
            "source": "pyslurm" if "pyslurm" in greeting else "json",
        },
        settings=lambda: loop.settings,
        last=lambda: (loop.last, parts.store.memory()) if loop.last is not None else None,
        good_at_s=lambda: loop.good_at_s,
        illness=loop.illness,
        pause_s=lambda: loop.pause_s,
        reports=lambda: parts.hub.reports,
        refused=lambda: dict(parts.hub.refused),
        store=parts.store.path,
    )
    registry.register(ClusterGauges(sources))
    return MetricsServer(loop.settings.service.metrics, "service.metrics", registry, loop.illness)


def _opened_store(settings: Settings, clock: SystemClock) -> SqliteStore:
    """Return the store; raise StoreError if it cannot be opened, as on a full disk, once our jobs are released."""
    path = Path(settings.service.store)
    try:
        return SqliteStore(path, clock)
    except StoreError:
        if not guard_settings(settings).killed:
            with closing(open_gateway(settings.service.gateway)) as slurm:
                for action, outcome in release_unrecorded(slurm, read_undo(path), UNDONE_REASON):
                    log_action(action, outcome)
        raise


def _run(loop: Loop, config: Path, watchdog: Watchdog) -> None:
    def nap() -> None:
        if loop.acting:
            watchdog.start()
        else:
            watchdog.goodbye()  # what is on this host's record is the other's to undo now
        notify("WATCHDOG=1")

    with _signals(loop):
        loop.follow_slurmctld()
        if loop.acting:
            loop.settle()
        notify("READY=1")
        loop.run(lambda: load_settings(config), nap)
        notify("STOPPING=1")
        try:
            if loop.acting:
                loop.let_go()
        except Exception as error:  # noqa: BLE001 (Slurm may be away: then this is the watchdog's work)
            log.warning("could not release our jobs (%s); the watchdog goes on trying", error)
        else:
            watchdog.goodbye()


@contextmanager
def _signals(loop: Loop) -> Iterator[None]:
    """SIGTERM and SIGINT end the loop, SIGHUP reloads; the former handlers come back at the end."""

    def stop(number: int, frame: object) -> None:
        del number, frame
        loop.stop = True

    def reload(number: int, frame: object) -> None:
        del number, frame
        loop.reload = True

    wanted = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: reload}
    former = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
