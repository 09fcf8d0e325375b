"""Check of ``cadenza doctor --gpu``: a site's own scripts, some of which take one lane for the whole host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from cadenza.policies.core.errors import CadenzaError
from cadenza.slurm_plugin.gateway.slurm_gateway import slurm_config
from cadenza.slurm_plugin.site.checks import Finding

KEYS = ("Prolog", "Epilog", "HealthCheckProgram", "TaskProlog", "TaskEpilog")
"""Settings that name programs which Slurm runs on a node (slurm.conf(5)); lists have one key for each, Epilog[0]."""
MAX_BYTES, MAX_FILES, MAX_DEPTH = 256 * 1024, 64, 3
SAFE = "cadenza-agent --jobs"
ADVICE = f"ask `{SAFE}` instead, see docs/site-scripts.md"
_PATH = re.compile(r"(?<![\w.=-])/[\w./+-]+")
_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(pkill|killall|skill|slay)\b"), "kills by user or name: also processes of jobs on other lanes"),
    (
        re.compile(r"\bkill\s+(-9|-KILL|-SIGKILL|-s\s*(9|KILL|SIGKILL))\b"),
        "kills processes that it has found by itself: they may be those of another lane",
    ),
    (
        re.compile(r"\bnvidia-smi\b|\bdcgmi\b"),
        "goes by the processes or the memory on a GPU: a job that waits for its turn keeps a context there",
    ),
    (
        re.compile(r"\b(squeue|scontrol|sacct)\b[^\n|;]*\s(-w|--nodelist|show\s+node)\b"),
        "asks Slurm about one node: jobs on the host's other lanes are not among the answers",
    ),
    (
        re.compile(r"\bnproc\b|\blscpu\b|/proc/cpuinfo|SLURM_CPUS_ON_NODE|SLURM_JOB_CPUS_PER_NODE"),
        "compares CPUs with the host's: a job that has all of its lane is not alone",
    ),
    (
        re.compile(r"/run/gpustat\b|\bdcgm[\w./-]*(job|map)[\w./-]*"),
        "writes an exporter's file: other lanes' jobs overwrite and remove it; the agent has one, see docs/metrics.md",
    ),
)
"""Host-wide tests, kills and files, with what goes wrong where a host has lanes."""


class SiteScripts(msgspec.Struct, frozen=True):
    """Input of the check: the texts of all scripts by setting and path, or why they are not known."""

    texts: Mapping[str, Mapping[str, str]] = {}
    problem: str = ""


def gather_scripts(read_config: Callable[[], Mapping[str, str]] = slurm_config) -> SiteScripts:
    """Read the programs that Slurm's configuration names, and the scripts that they name in turn."""
    try:
        config = read_config()
    except CadenzaError as error:
        return SiteScripts(problem=str(error))
    texts = {}
    for key in sorted(config):
        if key.partition("[")[0] in KEYS and config[key].startswith("/"):
            files: dict[str, str] = {}
            for name in config[key].split(","):
                for path in sorted(Path("/").glob(name.strip().lstrip("/"))):
                    _read(path, files, MAX_DEPTH)
            texts[key] = files
    return SiteScripts(texts)


def _read(path: Path, files: dict[str, str], depth: int) -> None:
    """Add a script, or those of a folder, and the scripts that it names; programs that are no text are left out."""
    if depth == 0 or len(files) >= MAX_FILES or str(path) in files:
        return
    try:
        if path.is_dir():
            for inner in sorted(path.iterdir())[:MAX_FILES]:
                _read(inner, files, depth - 1)
            return
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return
    files[str(path)] = text
    if not path.is_relative_to("/proc") and text.startswith("#!"):
        for name in dict.fromkeys(_PATH.findall(_COMMENT.sub("", text))):
            if not name.startswith(("/dev", "/proc", "/sys", "/usr", "/bin", "/sbin")):
                _read(Path(name), files, depth - 1)


def examine_scripts(scripts: SiteScripts) -> Iterator[Finding]:
    """Yield a warning for each kind of host-wide test or kill, with file and line."""
    if scripts.problem:
        yield Finding("WARN", "site scripts", scripts.problem, "run it where `scontrol show config` answers")
    for key, files in scripts.texts.items():
        found = [finding for path, text in files.items() for finding in _findings(key, path, text)]
        yield from found
        if not found:
            asks = any(SAFE in text for text in files.values())
            text = f"it asks {SAFE}" if asks else f"no host-wide test or kill in {len(files)} files"
            yield Finding("OK", key, text)


def _findings(key: str, path: str, text: str) -> Iterator[Finding]:
    bare = _COMMENT.sub("", text)
    for pattern, effect in PATTERNS:
        if (match := pattern.search(bare)) is not None and SAFE not in text:
            line = bare.count("\n", 0, match.start()) + 1
            yield Finding("WARN", key, f"{path}:{line}: `{match[0].strip()}` {effect}", ADVICE)
