"""Options of `cadenza run` for scripts that save and resume by themselves, checked and put into the environment."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

SAVES, RESUME_ARG, SAVE_SIGNAL = "--saves", "--resume-arg", "--save-signal"
PLACE = "{path}"
"""Stands for the newest checkpoint in ``--resume-arg``."""
LAUNCHERS = frozenset({"torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "horovodrun", "colossalai"})
LAUNCHER_MODULES = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
RANKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "WORLD_SIZE")


def refusal(  # noqa: PLR0911 - one return for each reason
    options: Mapping[str, str], command: Sequence[str], environ: Mapping[str, str]
) -> str:
    """Return the reason why these options cannot be served; "" if they can."""
    if not options.get(SAVES):
        return next((f"{one} needs {SAVES}" for one in (RESUME_ARG, SAVE_SIGNAL, SAVES) if one in options), "")
    number = getattr(signal, f"SIG{_name(options.get(SAVE_SIGNAL, 'USR1'))}", None)
    if not isinstance(number, signal.Signals):
        return f"{SAVE_SIGNAL} {options[SAVE_SIGNAL]}: there is no such signal; USR1 is the usual one"
    if number in {signal.SIGKILL, signal.SIGSTOP}:
        return f"{SAVE_SIGNAL} {options[SAVE_SIGNAL]}: no script can handle it"
    launcher = next((one for one in command if Path(one).name in LAUNCHERS or one in LAUNCHER_MODULES), None)
    if launcher is not None:
        return f"{SAVES} is for one process, and {launcher} starts several ranks: see client.checkpoint()"
    several = next((name for name in RANKS if environ.get(name, "") not in {"", "1"}), None)
    if several is not None:
        return f"{SAVES} is for one process, and {several} is {environ[several]}: see client.checkpoint()"
    if environ.get("CADENZA_BATCH"):
        return (
            f"{SAVES} is not for an elastic job (--cadenza=batch={environ['CADENZA_BATCH']}): see client.checkpoint()"
        )
    return ""


def prepare(options: Mapping[str, str], command: list[str], environ: dict[str, str]) -> list[str]:
    """Put the options into the environment; return the command, which resumes from the second start on."""
    from cadenza.sidecar.client.bootstrap import script_saves  # noqa: PLC0415

    pattern = os.path.abspath(options[SAVES])  # noqa: PTH100 - of a pattern
    environ[script_saves.SAVES_ENV] = pattern
    if SAVE_SIGNAL in options:
        environ[script_saves.SIGNAL_ENV] = _name(options[SAVE_SIGNAL])
    argument = options.get(RESUME_ARG)
    if argument is None or environ.get("SLURM_RESTART_COUNT", "0") in {"", "0"}:
        return command
    found = script_saves.newest_whole(pattern)
    if found is None:
        return command if PLACE in argument else [*command, *shlex.split(argument)]
    return [*command, *(word.replace(PLACE, found.path) for word in shlex.split(argument))]


def watch(environ: Mapping[str, str] = os.environ) -> None:
    """Note which checkpoints of the script this process opens, if it is one of a job that was started again."""
    if environ.get("CADENZA_SAVES") and environ.get("SLURM_RESTART_COUNT", "0") not in {"", "0"}:
        from cadenza.sidecar.client.bootstrap import script_saves  # noqa: PLC0415

        script_saves.watch_opens(environ["CADENZA_SAVES"])


def _name(text: str) -> str:
    """Return a signal's name without SIG."""
    return text.upper().removeprefix("SIG")
