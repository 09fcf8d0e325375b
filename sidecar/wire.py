"""The wire between a job and its node's agent: socket messages and the shared page (stdlib only).

Socket
    ``AF_UNIX`` ``SOCK_SEQPACKET`` at ``/run/cadenza/agent.sock`` (``CADENZA_SOCKET`` overrides it). One packet
    is one JSON object of at most ``MAX_PACKET`` bytes with ``"v": VERSION`` and a ``"type"``. The peer's uid and
    pid come from ``SO_PEERCRED``, never from the message.

Messages, job side to agent
    ``start``     the SPANK plugin, as root, before a task is executed: registers the job, then waits
    ``end``       the SPANK plugin's epilog, as root: the job has left this node
    ``ask``       a process of a job that started without its lease: it waits for it before it uses a GPU
    ``attach``    the client of one rank of a registered job; answered by ``attached`` with the page's memfd as
                  SCM_RIGHTS. It makes no lease: job and restart name one that root has registered
    ``arrived``   a rank stands at its stop boundary; ``refused`` names state that cannot be moved
    ``yielded``   the rank's GPU state is in host memory and its GPU memory free
    ``resumed``   the rank has its state back and goes on
    ``checkpointed``  the rank stands at its stop boundary and its part of a complete checkpoint is on the disk
    ``restored``  a rank of a moved job goes on from what was saved; ``unrestored``: it trains without
    ``unready``   why a rank that has savers can save no checkpoint
    ``detach``    the rank will not stop any more
    ``requeued_by``  other software requeues this job by a signal handler; the rank noticed it after ``attach``
Messages, agent to job side
    ``lease``     to ``start`` and ``ask``: ``state`` is ``granted``, ``wait`` (repeated every few seconds) or
                  ``giveup``; to ``start`` of a job that asks by itself ``late``: it may start, and use no GPU yet
    ``attached``  ``state`` is ``held`` (go on), or ``yielded`` (move your state out and wait for ``resume``)
    ``receipt``   what was saved before the job was requeued, if ``attached`` could not say it yet
    ``stop``      stop at the first boundary whose step is at least ``step`` (also in the page)
    ``commit``    all ranks have arrived: move the state out; after ``resumed`` with ``standing``: all have their state
    ``cancel``    the stop is withdrawn, go on; after ``resumed`` with ``standing``: move the state out again and wait
    ``save``      to a rank that has yielded: save a checkpoint from the host copy of your state, and wait on
    ``resume``    the lease is yours: move the state back
    ``note``      a sentence for the job's output
    ``error``     the message was refused; ``error`` gives the reason

Fields (those in brackets may be missing; an unknown one is ignored)
    ``start``     job restart uid user node lane gpus hosts managed step [options cpus memory_mb late]
    ``end``       job [restart]
    ``ask``       job [restart]
    ``attach``    job restart rank world_size local_world_size state (running | arrived | yielded) step
                  [gpus] (list of int) [node] [hosts] [requeue_owner] (as the owner of ``requeued_by``) [together]
                  (it can stand with its state back until all ranks have theirs)
    ``arrived``   order step bytes [refused] [held_bytes] [stays_bytes] (both lists, by the device's index in this
                  process: the device bytes of torch's allocator, and those of them that will stay)
    ``yielded``   [order] copy_s bytes [left] (device bytes this process keeps) [resident] [error] (the move
                  failed and was undone: the rank runs on) [no_room] (after ``resume``: the GPU is too full)
                  [failed] (after ``resume``: the GPU fails) [survey_s] (seconds of copy_s's preparation: the state was
                  looked at) [needed_bytes] [regrown_bytes] (both lists, by the device's index in this process: what
                  torch, and what NCCL, will take of each GPU to go on)
    ``resumed``   copy_s [order] [standing] (to a ``resume`` with ``together``, until ``commit`` or ``cancel``)
    ``checkpointed``  order step bytes seconds paths (list of absolute paths, one of each saver; empty only with error)
                  [lost_s] (training since then that is repeated) [error] (it failed: nothing is lost, the rank runs on)
    ``requeued_by``  owner (``lightning``, ``submitit``; "" takes it back)
    ``lease``     state [reason]
    ``restored``  path step;  ``unrestored``: reason;  ``unready``: reason ("": ready)
    ``attached``  state rank [reason] (the wait's) [receipt] (as in ``receipt``), and the page's descriptor
    ``receipt``   receipt: an object with restart (the first start that has to find it), step, paths and away_s (seconds
                  since it was saved; 0: not known); empty if the job has to find nothing. Paths may be left out
    ``stop``      order step;  ``commit`` and ``save``: order [goal] (what the job does when it has saved, a predicate);
                  ``resume``: order [together];  ``cancel``: order reason;  ``note``: text;  ``error``: error

Rules
    Only ``resume`` moves state back: it follows an ``attached`` with ``held`` to a rank that sent ``yielded``. A rank
    that is out sends ``yielded`` again when a signal handler's exception has ended its wait, or when it could not
    follow a ``resume`` because its GPU is too full or fails; a holder's rank is then sent ``resume`` again. A rank
    sets PAGE_STATE to STATE_ARRIVED before it examines the state to move, and then sends ``arrived``. A connection
    that ends before ``commit`` withdraws the stop. A second ``attach`` of a process replaces its first. ``cancel`` and
    ``stop`` with another order than the current one are out of date. PAGE_PURPOSE is the purpose of a stop. For a
    checkpoint a rank passes the boundaries that are no save points, and says why in PAGE_PASSED: it runs on as if it
    had slipped past. After ``commit`` of a checkpoint the ranks save together, send ``checkpointed`` and stand until
    ``cancel`` sends them on or their job is requeued. ``save`` goes only to ranks with SAVES_AWAY; they need no
    boundary, because they stand at one, and go on waiting for ``resume``.

Limits
    A user's connection that has not attached within 5 s is closed. A job has at most 64 ranks on a host, or one on
    each CPU of its allocation. Packets of a job, and of a user's processes that have not attached, are read at up to
    100 a second after the first thousand, and 256 KiB a second after the first 4 MiB; the rest waits in the sender's
    socket. Numbers are finite and have at most 62 bits. Names are one line of valid Unicode without control characters
    and at most 255 characters; texts for people are made so, and cut at 1,000 characters. What is beyond is answered
    by ``error`` and has no effect.

Page
    One 4096-byte memfd for each rank. The client writes its words and the agent its own, each by one aligned
    8-byte store, so that a step costs no system call. The client's words are one record under a sequence lock:
    PAGE_SEQUENCE is odd while it writes. A copy is valid if the reader found the same even number before and after;
    it tries a few times and then does without. This needs stores to become visible in program order, as on x86-64;
    elsewhere a record may mix two adjacent steps, which counters that only grow survive.
    PAGE_LAYOUT is the set of words that a client writes: 0 the words up to PAGE_SAMPLES and the coarse histogram,
    without a sequence lock; 1 all but that histogram. Words are only ever added, so that agents and clients of
    different ages work together: a word that the other side does not write is 0.
    The agent writes a job's present resources before PAGE_TUNE_COUNT. A client that finds another count reads them; if
    the agent writes the next values at that time, the count changes again and the client reads again.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

VERSION = 1
MAX_PACKET = 65536
DEFAULT_SOCKET = "/run/cadenza/agent.sock"
FILES_NAME = "cadenza-files"
"""Name of a memfd that a client may keep open: files that it has imported or will need, one path a line."""
SOCKET_ENV = "CADENZA_SOCKET"

PAGE_BYTES = 4096
# Indices of 8-byte words (native order). Client's half:
PAGE_MAGIC = 0
PAGE_STEP = 1
"""Completed boundaries."""
PAGE_LAST_NS = 2
"""CLOCK_MONOTONIC of the last boundary."""
PAGE_SUM_NS = 3
"""Sum of iteration times; the time spent yielded is not in it."""
PAGE_STATE = 4
PAGE_SAMPLES = 5
"""Training samples passed to ``boundary(samples)``; 0 without any. The mean iteration time is PAGE_SUM_NS over the sum
of the histogram."""
PAGE_LAYOUT = 6
"""The client's LAYOUT; 0 for clients without one."""
PAGE_SEQUENCE = 7
PAGE_WAITED_NS = 8
"""Time that the training loop was blocked in its loader."""
PAGE_MEMORY_KIND = 9
"""Kind of memory in the next two words: one of ``MEMORY_…``."""
PAGE_MEMORY_LOW = 10
"""Least memory in use at a sampled boundary, in bytes."""
PAGE_MEMORY_PEAK = 11
"""Most memory in use at any time, in bytes."""
PAGE_SAVES = 12
"""0, or one of ``SAVES_…`` if this rank can save a checkpoint on order; only then it is asked to."""
PAGE_PASSED = 13
"""Why the last boundary at or beyond the stop step of a checkpoint was no save point: one of ``PASSED_…``."""
PAGE_SAVE_EVERY = 14
"""Training steps between the last two saves of the script itself, where it can be saved only at these; else 0."""
PAGE_ORDER_COUNT = 15
"""Stops that this rank has reached; the last ORDERS_KEPT of them are in the ring."""
PAGE_LOST_MS = 48
"""Training since the script's own last checkpoint, which a move now would repeat, in ms; 0: it would repeat none."""
PAGE_ORDERS = 16
"""First of ORDERS_KEPT entries of ORDER_WORDS words: the order's number, CLOCK_MONOTONIC at which its boundary
was reached, and the ns from there until the rank was ready to stop and until its state was out (0: never)."""
ORDERS_KEPT = 8
ORDER_WORDS = 4
PAGE_HISTOGRAM = 64
"""First of HISTOGRAM_BUCKETS counters of iteration times, see :func:`bucket`; for clients of layout 0."""
HISTOGRAM_BUCKETS = 160
# Agent's half:
PAGE_STOP = 256
"""0: go on; else stop at the first boundary whose step is at least this."""
PAGE_ORDER = 257
"""Number of the order that PAGE_STOP belongs to."""
PAGE_PURPOSE = 258
"""Purpose of the order: one of ``PURPOSE_…``."""
PAGE_CPUS_CENTI = 259
"""Present CPUs of the whole job on this node, in hundredths."""
PAGE_CACHE_MB = 260
"""Host memory, in MiB, for the caches of the job's loaders on this node, all its ranks together; or UNSAID."""
PAGE_TUNE_COUNT = 261
"""Number of writes of the two words before it; 0: they are void."""

# Client's again:
PAGE_FINE = 264
"""First of FINE_BUCKETS counters of iteration times, see :func:`fine_bucket`; from layout 1 on."""
FINE_BUCKETS = 248
FINE_BITS = 11
"""Bits of the shortest time, about 1 µs, that has a fine bucket of its own."""

LAYOUT = 1
UNSAID = 2**64 - 1
MEMORY_UNKNOWN = 0
MEMORY_HOST = 1
"""Resident set of the process."""
MEMORY_GPU = 2
"""Memory given out by torch's allocator on the rank's current device."""

QUARTERED_BITS = 3
"""From this many bits on an octave has four buckets; below, each number is a bucket."""

MAGIC = 0x43414445_4E5A4131  # "CADENZA1"

SAVES_AT_BOUNDARY = 1
"""It can save while it holds its GPUs."""
SAVES_AWAY = 2
"""It can also save while its state is in host memory."""

PASSED_EVALUATION = 1
PASSED_GRADIENTS = 2
PASSED_UNKNOWN_GRADIENTS = 3
PASSED_EPOCH_END = 4
PASSED_UNTIL_OWN_SAVE = 5
PASSED_UNNAMED = 6
PASSED_WORDS = {
    PASSED_EVALUATION: "it is in an evaluation, or one follows the step",
    PASSED_GRADIENTS: "gradients are pending: no optimizer has stepped since the boundary before, or backward() has "
    "run since",
    PASSED_UNKNOWN_GRADIENTS: "nothing tells whether gradients are pending, because no optimizer of torch.optim steps: "
    "set them to None before boundary()",
    PASSED_EPOCH_END: "the epoch's own work, after its last batch, is still to come",
    PASSED_UNTIL_OWN_SAVE: "it can be saved only where its script saves by itself",
    PASSED_UNNAMED: "its script has not named this step: call keeper.at(step) in each step",
}
"""Why a boundary is no save point, for people."""

PURPOSE_YIELD = 0
PURPOSE_CHECKPOINT = 1

STATE_RUNNING = 0
STATE_ARRIVED = 1
STATE_YIELDED = 2


class WireError(Exception):
    """A packet that this version cannot read; the sender must be fixed or upgraded."""


def encode(kind: str, **fields: Any) -> bytes:
    """Return one packet; raise WireError when it would exceed MAX_PACKET, or holds a number that is not finite."""
    try:
        packet = json.dumps({"v": VERSION, "type": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()
    except ValueError as error:
        raise WireError(f"{kind}: {error}") from None
    if len(packet) > MAX_PACKET:
        raise WireError(f"{kind}: {len(packet)} bytes exceed the packet limit of {MAX_PACKET}")
    return packet


def decode(packet: bytes) -> dict[str, Any]:
    """Return the packet's object; raise WireError unless it is one of this version with a type."""
    # recv(2) on SOCK_SEQPACKET cuts a packet off without an error: the reader takes one byte more than a packet may
    # have.
    if len(packet) > MAX_PACKET:
        raise WireError(f"not JSON: cut off, its packet exceeds {MAX_PACKET} bytes")
    try:
        message = json.loads(packet, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise WireError("not an object with a type")
    version = message.get("v")
    if type(version) is not int or version != VERSION:
        raise WireError(f"version {ascii(version)[:40]}, this side speaks {VERSION}")
    return message


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and the infinities, which Python's JSON has beyond RFC 8259."""
    raise ValueError(f"{name} is no number")


def bucket(nanoseconds: int) -> int:
    """Return the histogram bucket of an iteration time: four buckets an octave, 19 % wide.

    >>> bucket(0), bucket_upper_ns(bucket(1000)) >= 1000
    (0, True)
    """
    bits = nanoseconds.bit_length()
    if bits < QUARTERED_BITS:
        return max(0, nanoseconds)
    return min((bits - 2) * 4 + ((nanoseconds >> (bits - 3)) & 3), HISTOGRAM_BUCKETS - 1)


def bucket_upper_ns(index: int) -> int:
    """Return the largest iteration time, in ns, that falls into a bucket."""
    if index < 1 << (QUARTERED_BITS - 1):
        return index
    octave, quarter = divmod(index, 4)
    return ((quarter + 5) << (octave - 1)) - 1


def fine_bucket(nanoseconds: int) -> int:
    """Return the fine bucket of an iteration time: eight an octave from 1 µs to 36 min, the ends take the rest.

    >>> low, high = fine_bounds_ns(fine_bucket(5_000_000))
    >>> low <= 5_000_000 < high, high / low <= 9 / 8
    (True, True)
    """
    bits = nanoseconds.bit_length()
    if bits < FINE_BITS:
        return 0
    return min(8 * (bits - FINE_BITS) + ((nanoseconds >> (bits - 4)) & 7), FINE_BUCKETS - 1)


def fine_bounds_ns(index: int) -> tuple[int, int]:
    """Return the least iteration time of a fine bucket and of the next one, in ns."""
    octave, eighth = divmod(index, 8)
    width = 1 << (octave + FINE_BITS - 4)
    return (8 + eighth) * width, (9 + eighth) * width
