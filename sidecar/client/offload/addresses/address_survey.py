"""Choice between a move at which addresses stay and one of storages, with the reason for the second."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from cadenza.sidecar.client.offload import device, fixed_addresses, storages
from cadenza.sidecar.client.offload.addresses import preloaded, segment_ranges
from cadenza.sidecar.client.offload.copy_plan import AddressPlan
from cadenza.sidecar.client.offload.process_look import ProcessLook
from cadenza.sidecar.client.offload.storages import Survey

HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
"""With it, torch registers its allocator's segments with NCCL."""

_log = logging.getLogger("cadenza.client")


class _Told:
    """The reason that was logged last; each is said once."""

    reason = ""


_told = _Told()


def survey(
    sources: Iterable[tuple[str, object]],
    *,
    refuse_resident: bool = False,
    everything: bool = False,
    before: ProcessLook | None = None,
) -> Survey:
    """Find what moves with its addresses kept, all of torch's memory; else survey the storages of the sources.

    The reason why addresses cannot stay is logged once, and added to a refusal of the storages.
    """
    found = look(before)
    if isinstance(found, AddressPlan):
        return Survey((), (), None, in_place=found)
    if found != _told.reason:
        _told.reason = found
        _log.warning("device addresses change at a yield: %s", found)
    result = storages.survey(sources, refuse_resident=refuse_resident, everything=everything, before=before)
    return replace(result, refusal=f"{result.refusal}; addresses cannot stay: {found}") if result.refusal else result


def look(before: ProcessLook | None = None) -> AddressPlan | str:
    """Return the move of all that torch has on the GPUs, or the reason why addresses cannot stay.

    ``before`` is a look at the process of a moment ago.
    """
    accelerator, library = device.in_use(), preloaded.library()
    if accelerator is None:
        return "the process uses no GPU"
    if library is None:
        return missing()
    if error := library.counters().no_driver:
        return f"the library cannot use the driver (error {error})"
    now = ProcessLook(before)
    refusal = fixed_addresses.allocator_refusal(accelerator.module.get_allocator_backend()) or _registered()
    return refusal or _pools(accelerator, now) or plan(library, now.snapshot)


def plan(library: preloaded.Library, snapshot: Sequence[Any]) -> AddressPlan | str:
    """Return the move of the allocator's segments, or the reason why some are not the library's."""
    served = {one.address: (one.number, one.size) for one in library.segments()}
    return segment_ranges.plan(snapshot, served)


def missing() -> str:
    """Return the reason why the library is not in this process, and what its user or admin does about it."""
    if preloaded.path() is None:
        return f"no agent on this host has {preloaded.NAME}, or it is not in this container"
    return (
        f"{preloaded.NAME} was not loaded when the process started: submit the job with --cadenza=graphs, "
        "or start the script by `cadenza run --graphs`"
    )


def _registered() -> str | None:
    """Return the reason why NCCL may have registered torch's memory with other ranks or network cards, if it may.

    Any group may be one of NCCL, also where the first is not.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    # A group of one rank registers nothing with others.
    if distributed.get_world_size() < 2:  # noqa: PLR2004
        return None
    if os.environ.get(HOOK, "0") not in {"", "0", "false", "no"}:
        return f"torch registers its memory with NCCL ({HOOK})"
    if os.environ.get(preloaded.NCCL_GRAPHS) != "0":
        return f"NCCL registers the buffers of captured graphs: start the ranks with {preloaded.NCCL_GRAPHS}=0"
    return None


def _pools(accelerator: device.Accelerator, now: ProcessLook) -> str | None:
    """Return the reason why memory pools of the script's own forbid it: buffers there may be registered with NCCL.

    Only where there are private pools, those of graphs, too, are all objects of Python looked at.
    """
    if not fixed_addresses.private_ranges(now.snapshot, ()):
        return None
    ranges = fixed_addresses.private_ranges(now.snapshot, fixed_addresses.mem_pools(accelerator, now.objects))
    return fixed_addresses.pool_refusal(one for one in ranges if one.owner == fixed_addresses.POOL)
