"""Short readable names for sets of GPUs and lists of jobs, and clean lines of text that others wrote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import category

from cadenza.policies.core.model import Gpu, JobKey, Lease


def gpu_names(gpus: Iterable[Gpu]) -> str:
    """Return a compact name of a set of GPUs, hosts in order.

    >>> gpu_names([Gpu("node2", 0), Gpu("node1", 3), Gpu("node1", 0), Gpu("node1", 1)])
    'node1:gpu0-1,3 node2:gpu0'
    """
    ordered = sorted(gpus)
    if len(ordered) == 1:  # the most frequent case, and this is called for every job of a round
        return f"{ordered[0].host}:gpu{ordered[0].index}"
    hosts: dict[str, list[int]] = {}
    for host, index in ordered:
        hosts.setdefault(host, []).append(index)
    return " ".join(f"{host}:gpu{ranges(indices)}" for host, indices in hosts.items()) or "no GPU"


def job_names(keys: Iterable[JobKey]) -> str:
    """Return ``job 3`` or ``jobs 3 and 5``, in order.

    >>> job_names([JobKey(5, 0), JobKey(3, 1), JobKey(9, 0)])
    'jobs 3.1, 5 and 9'
    """
    return jobs_called([str(key) for key in sorted(keys)])


def jobs_called(names: Sequence[str]) -> str:
    """Return ``job 3`` or ``jobs 3 and 5`` of names that are in order."""
    if len(names) < 2:  # noqa: PLR2004 - one name needs no list
        return f"job {''.join(names)}"
    return f"jobs {', '.join(names[:-1])} and {names[-1]}"


def printable(text: str, length: int = 200) -> str:
    r"""Return a text from outside as one line of at most ``length`` characters that any log, store and page can take.

    Blanks of all kinds and ends of lines become spaces; surrogates, other control characters and marks that turn the
    writing direction become U+FFFD.

    >>> printable("a\x1b[2J\ud800"), printable("17.0\u202fh\nof")
    ('a\ufffd[2J\ufffd', '17.0 h of')
    """
    if not text.isprintable():
        text = "".join(map(_shown, text[: length + 1]))
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character in "\t\n\r" or category(character) == "Zs" else "\ufffd"


def lost_text(lease: Lease, *, requeueable: bool) -> str:
    """Return the fate of a job that its agent has lost, and the reason."""
    how = "is requeued" if requeueable else "not requeueable: cancel it and submit it again"
    return f"cannot go on, {how}: {lease.lost}"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as a list of ranges, as the kernel writes it.

    >>> ranges([8, 0, 2, 1])
    '0-2,8'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
