"""Record of the trials on a host's GPU: the agent stops jobs by no driver with which they have not passed."""

from __future__ import annotations

from pathlib import Path

import msgspec

RECORD = "driver_trial.json"
"""Name of the record in the agent's state directory."""
MAX_RECORD_BYTES = 1 << 16


class EngineTrial(msgspec.Struct, frozen=True):
    """Trial of the offload engine; ``failed`` and ``not_run`` are empty when it passed."""

    failed: str = ""
    not_run: str = ""
    """Reason why there was none."""
    torch: str = ""
    """Version of the torch that it ran with."""
    bytes: int = 0
    """State that went out and came back."""
    out_s: float = 0.0
    """Seconds of the way out, with the time in which its host memory was pinned."""
    back_s: float = 0.0
    left_bytes: int = 0
    """Memory that torch kept on the GPU while the state was away."""
    kept_bytes: int | None = None
    """The same by NVML, without the context; None where NVML did not show the process."""
    pinned: bool = False
    """All of the host memory was pinned."""


class Record(msgspec.Struct, frozen=True):
    """The last trials on this host; ``failed``, of the driver's process checkpoints, is empty when they passed."""

    driver: str
    """The driver's version by NVML."""
    failed: str = ""
    bytes: int = 0
    """Memory that NVML showed of the process before its checkpoint, its context included."""
    checkpoint_s: float = 0.0
    restore_s: float = 0.0
    plain_bytes: int = 0
    """Mappings of /dev/nvidia-uvm of a process without managed memory."""
    managed_bytes: int | None = None
    """The same with managed memory; None where the GPU has none."""
    engine: EngineTrial = EngineTrial(not_run="no trial yet")


def read(directory: Path) -> Record:
    """Return the record; raise OSError or msgspec.DecodeError."""
    with (directory / RECORD).open("rb") as file:
        return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=Record)


def objection(directory: Path, driver: str) -> str:
    """Return the reason why jobs of this host must not be stopped by the driver ``driver``; "" after a good trial."""
    try:
        record = read(directory)
    except FileNotFoundError:
        return "no trial on this host yet: run `cadenza doctor --gpu` here, with a GPU free"
    except (OSError, msgspec.DecodeError) as error:
        return f"the record of the last trial cannot be read ({error}): run `cadenza doctor --gpu` here"
    if not driver:
        return "NVML does not tell the driver's version"
    if record.driver != driver:
        return f"the last trial was with driver {record.driver}, and this is {driver}: run `cadenza doctor --gpu` here"
    failed = record.failed or record.engine.failed
    return f"the trial failed (`cadenza doctor --gpu`): {failed}" if failed else ""


def keep(directory: Path, record: Record) -> None:
    """Write the record; raise OSError."""
    unnamed = directory / f"{RECORD}.new"
    unnamed.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    unnamed.replace(directory / RECORD)
