"""Slurm's error numbers and texts, and the error of ours that each becomes."""

from __future__ import annotations

from cadenza.slurm_plugin.errors import ActionRefused, GatewayError, NotAuthorized, SlurmUnavailable, StaleState

# Numbers of slurm_errno.h, the same from Slurm 23.02 to 26.05 as far as they are named here.
_UNAVAILABLE = frozenset({*range(1001, 1024), *range(1800, 1806), 2027, 2131, *range(5000, 5008)})
_AUTHENTICATION = frozenset({1007, *range(6000, 6012)})
_NOT_AUTHORIZED = frozenset({2002, 2010, 2052})
_STALE = frozenset({2017, 2020, 2021, 2024, 2028, 2073, 2077, *range(2083, 2089), 2181})
_NOT_RUNNABLE = {
    2037: "the job was submitted with --no-requeue, or Slurm's configuration forbids this",
    2018: "a node of this name is not in slurm.conf",
}

# Slurm's texts for the numbers above (slurm_strerror), for commands that print no number.
_TEXTS = {
    "Protocol authentication error": 1007, "Unable to contact slurm controller": 1800, "Rate limit exceeded": 1804,
    "Slurm backup controller in standby mode": 2027, "Controller is in standby mode": 2131,
    "Socket timed out on send/recv operation": 5004, "Zero Bytes were transmitted or received": 5005,
    "Invalid authentication credential": 6000, "Authentication credential expired": 6001,
    "Access/permission denied": 2002, "Invalid user id": 2010, "Invalid job id specified": 2017,
    "Invalid node name specified": 2018, "Job can not be altered now, try again later": 2020,
    "Job/step already completing or completed": 2021, "Job is pending execution": 2024,
    "Requested operation is presently disabled": 2037, "Job is no longer pending execution": 2073,
    "Job is current suspended, requested operation disabled": 2077, "Job has already started": 2083,
    "Job has already finished": 2084, "Job is not running": 2085, "Job is not pending nor running": 2086,
    "Job is not suspended": 2087, "Job is not finished": 2088, "Invalid job state": 2181,
}  # fmt: skip


def errno_of(text: str) -> int | None:
    """Return Slurm's number for the message of one of its commands; None for a text that is not known.

    >>> errno_of("slurm_suspend error:Invalid job id specified")
    2017
    """
    return next((errno for known, errno in _TEXTS.items() if known in text), None)


def slurm_error(request: str, errno: int | None, message: str, *, node: bool = False) -> GatewayError:
    """Return the error for Slurm's answer ``errno``/``message`` to a request, ready to raise.

    ``node``: the request was about a node, which takes more rights than one about a job.
    """
    text = f"{request}: {message}" if errno is None else f"{request}: {message} (Slurm error {errno})"
    if errno in _AUTHENTICATION:
        return SlurmUnavailable(f"{text}; check that slurm.key or munge and the clock agree with slurmctld's")
    if errno in _UNAVAILABLE:
        return SlurmUnavailable(f"{text}; check `scontrol ping` on this machine")
    if errno in _NOT_AUTHORIZED:
        level = "Administrator" if node else "Operator"
        return NotAuthorized(f"{text}; grant it: sacctmgr modify user USER set AdminLevel={level}")
    if errno in _STALE:
        return StaleState(f"{text}; the next round reads the state anew")
    hint = _NOT_RUNNABLE.get(errno or 0, "")
    return ActionRefused(f"{text}; {hint}" if hint else text, errno)
