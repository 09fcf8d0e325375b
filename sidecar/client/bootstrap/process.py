"""The one session of this process, made by attach(); a forked child does not share it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from cadenza.sidecar import wire
from cadenza.sidecar.client.bootstrap import script_saves
from cadenza.sidecar.client.errors import AgentRefusedError
from cadenza.sidecar.client.offload import pin_threads
from cadenza.sidecar.client.offload.addresses.preloaded import ADDRESSES_ENV, STAY
from cadenza.sidecar.client.session import identity, lease_request, resources
from cadenza.sidecar.client.session.job_session import Session

SPILL_ENV = "CADENZA_SPILL_DIR"
"""Directory on a disk of the node, for state that does not fit into host memory; set by the admin or the user."""
LANE_ENV = "CADENZA_LANE"
"""The job's lane on this host, set by the SPANK plugin in the tasks of a managed job where there is an agent."""
REHEARSAL_ENV = "CADENZA_REHEARSAL"
"""Folder of a rehearsed job: its records, and its checkpoints in place of the script's own directories."""
ENROOT_OPTIONS = "x-create=dir,bind,rw,nosuid,nodev,noexec,nofail,silent"
"""Mount options of packaging/enroot/50-cadenza.fstab."""

OLDEST_TORCH = (2, 4)

_log = logging.getLogger("cadenza.client")


class _Process:
    """State of this process: its session, and whether it has warned."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.warned = False

    def abandon(self) -> None:
        """Abandon the parent's session in a forked child, such as a loader's worker; its copy stays, inert."""
        if self.session is not None:
            self.session.abandon()


_process = _Process()
os.register_at_fork(after_in_child=_process.abandon)


def current() -> Session | None:
    """Return this process's session, if attach() was called."""
    return _process.session


def prepare() -> Session:
    """Return this process's session; make one, not connected, if there is none."""
    _process.session = _process.session or Session()
    if "torch" in sys.modules:
        from cadenza.sidecar.client.session import compiled_steps  # noqa: PLC0415

        compiled_steps.end_steps_after_programs(Session.boundary)
    return _process.session


def attach(
    sources: Iterable[tuple[str, object]],
    *,
    socket: str | None = None,
    refuse_resident: bool = False,
    everything: bool = False,
    spill: str | None = None,
    addresses: str = "",
) -> Session:
    """Register the sources in this process's session, connect it if there is an agent, and return it.

    Without an agent, or when it does not accept this process, nothing is raised: the job runs as without Cadenza.
    """
    session = prepare()
    session.refuse_resident |= refuse_resident
    session.everything |= everything
    session.addresses_stay |= (addresses or os.environ.get(ADDRESSES_ENV)) == STAY
    session.spill_to = spill or session.spill_to or os.environ.get(SPILL_ENV, "")
    for name, thing in sources:
        session.register(name, thing)
    if old := outdated_torch():
        _warn_once(f"this process runs as without Cadenza: PyTorch {old} is older than 2.4")
    elif not session.active:
        _reach_agent(_agent_socket(socket), session.connect)
    session.await_state()
    if session.active and "torch" in sys.modules:
        from cadenza.sidecar.client.offload import exports  # noqa: PLC0415

        exports.watch()
        pin_threads.watch()
        resources.follow_threads()
    if script_saves.SAVES_ENV in os.environ:
        script_saves.follow(session)
    return session


def outdated_torch() -> str:
    """Return the version of this process's torch if the client cannot work with it; "" otherwise, and without torch."""
    version = str(getattr(sys.modules.get("torch"), "__version__", ""))
    return version if version and tuple(map(int, version.split(".")[:2])) < OLDEST_TORCH else ""


def detach() -> None:
    """Leave; a later attach() starts a new session. Without one, nothing happens."""
    session = _process.session
    if session is not None:
        session.detach()
        _process.session = None
    if "cadenza.sidecar.client.offload.exports" in sys.modules:
        sys.modules["cadenza.sidecar.client.offload.exports"].unwatch()
    if "cadenza.sidecar.client.bootstrap.auto" in sys.modules:
        sys.modules["cadenza.sidecar.client.bootstrap.auto"].uninstall()
    pin_threads.unwatch()


def wait_for_lease() -> None:
    """Wait for the lease of a job that started without it; return at once where there is no job or no agent."""
    _reach_agent(_agent_socket(None), lease_request.wait_for_lease)


def _agent_socket(given: str | None) -> str:
    """Return the path of the agent's socket."""
    return given or os.environ.get(wire.SOCKET_ENV) or wire.DEFAULT_SOCKET


def _reach_agent(path: str, talk: Callable[[str, identity.Identity], None]) -> None:
    """Talk to the agent, or warn once with the reason why this process runs without Cadenza."""
    who = identity.here()
    if who is None:
        _warn_once("not in a Slurm job: attach() does nothing")
    elif not os.access(Path(path).parent, os.X_OK):
        _warn_once(_missing(path))
    else:
        try:
            talk(path, who)
        except AgentRefusedError as error:
            _warn_once(f"the Cadenza agent does not accept this process, which runs as without it: {error}")


def _missing(path: str) -> str:
    """Return the reason why there is no socket: the host has no agent, or its folder is not in this container."""
    if LANE_ENV not in os.environ:
        return f"no Cadenza agent on this host ({path}): attach() does nothing"
    folder = Path(path).parent
    if os.environ.keys() & {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
        line = f"`bind path = {folder}` in apptainer.conf, or `--bind {folder}`"
    else:
        line = f"`{folder} {folder} none {ENROOT_OPTIONS}` in /etc/enroot/mounts.d, or another bind mount of {folder}"
    return (
        f"{folder} of this host is not in this container, so that attach() does nothing and the job on lane "
        f"{os.environ[LANE_ENV]} takes no turns; missing: {line}"
    )


def _warn_once(text: str) -> None:
    if not _process.warned:
        _process.warned = True
        _log.warning(text)
