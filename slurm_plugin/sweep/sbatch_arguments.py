"""Arguments of one configuration's sbatch: placeholders filled in, or the values appended."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.sweep.configs import RESERVED

PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_][A-Za-z0-9_-]*)\}")
"""``{name}``, but not the shell's ``${name}``."""
REFUSED = {
    "--comment": "the sweep sets it; give Cadenza's options with --cadenza=…",
    "--job-name": "the sweep finds its jobs by it",
    "-J": "the sweep finds its jobs by it",
    "--array": "each configuration is a job of its own",
    "-a": "each configuration is a job of its own",
    "--wait": "the sweep itself waits",
    "-W": "the sweep itself waits",
    "--test-only": "a sweep needs jobs",
}


def check_words(words: Sequence[str], names: Sequence[str]) -> None:
    """Raise InputError for sbatch options that a sweep cannot take, and for placeholders without a value.

    ``names`` are those of the configurations, or empty while these are unknown.
    """
    if not words:
        raise InputError("the options and the script for sbatch are missing after --")
    for word in words[: script_at(words)]:
        option = word.split("=", 1)[0]
        if option in REFUSED:
            raise InputError(f"sbatch option {option}: {REFUSED[option]}")
        if option == "--export" and not word.startswith("--export=ALL"):
            raise InputError(f"{word}: the jobs need the sweep's variables, so it must begin with --export=ALL")
    if names:
        _check_placeholders(words, names)


def _check_placeholders(words: Sequence[str], names: Sequence[str]) -> None:
    allowed = [*names, *RESERVED]
    for word in words:
        for name in PLACEHOLDER.findall(word):
            near = get_close_matches(name, allowed, n=1)
            if name not in allowed and near:
                raise InputError(f"{{{name}}} in {word!r}: no configuration has it; did you mean {{{near[0]}}}?")
    wrapped = any(word.split("=", 1)[0] == "--wrap" for word in words[: script_at(words)])
    if wrapped and not _filled(words, names):
        raise InputError("--wrap: name the configuration's values in it, such as {" + names[0] + "}")


def fill(words: Sequence[str], config: Mapping[str, Any], reserved: Mapping[str, Any]) -> list[str]:
    """Return the words for one configuration; ``reserved`` has the values that the sweep sets.

    If no word has a placeholder of the configuration, ``--name value`` is appended for each of its values.
    """
    values = {**config, **reserved}
    filled = [PLACEHOLDER.sub(lambda match: _text(values.get(match[1], match[0])), word) for word in words]
    if _filled(words, list(config)):
        return filled
    return filled + [part for name, value in config.items() for part in (f"--{name}", _text(value))]


def script_at(words: Sequence[str]) -> int:
    """Return the position of the script, the first word that is a file; without one, the number of words."""
    return next((place for place, word in enumerate(words) if Path(word).is_file()), len(words))


def _filled(words: Sequence[str], names: Sequence[str]) -> bool:
    return any(name in names for word in words for name in PLACEHOLDER.findall(word))


def _text(value: Any) -> str:
    """Return a value as a command takes it.

    >>> _text(True), _text(1e-05), _text("adam")
    ('true', '1e-05', 'adam')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)
