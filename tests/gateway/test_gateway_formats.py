"""The version of Slurm's JSON: the newest that both sides know, asked for once for each installed Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.slurm_plugin.gateway.commands import Refusal, json_answer, json_format

RELEASES = {
    "24.11": ("v0.0.40 v0.0.41 v0.0.42", "v0.0.42"),
    "25.05": ("v0.0.40 v0.0.41 v0.0.42 v0.0.43", "v0.0.43"),
    "25.11": ("v0.0.41 v0.0.42 v0.0.43 v0.0.44", "v0.0.44"),
    "26.05": ("v0.0.43 v0.0.42 v0.0.45 v0.0.44", "v0.0.45"),
    "26.11": ("v0.0.43 v0.0.44 v0.0.45 v0.0.46", "v0.0.46"),
    "later": ("v0.0.45 v0.0.46 v0.0.47 v0.0.48", "v0.0.46"),
}
"""The versions in each release's src/plugins/data_parser, in no order, as the commands list them."""


def install(folder: Path, versions: str, second: int = 0) -> None:
    """Put a scontrol there that offers these versions, installed at a time of its own."""
    path = folder / "scontrol"
    listed = "; ".join(f"echo data_parser/{version}" for version in versions.split())
    unknown = 'echo "scontrol: error: load_plugins: unable to find plugin: data_parser/${3#--json=}" >&2; exit 1'
    path.write_text(
        f"#!/bin/sh\necho asked >>{folder}/asked\n"
        f'case "$*" in "ping --json=list") {listed or ":"}; echo "Possible data_parser plugins:" >&2 ;;\n'
        f'"show x --json") echo plain ;;\n'
        f'*) case " {versions} " in *" ${{3#--json=}} "*) echo "$*" ;; *) {unknown} ;; esac ;; esac\n'
    )
    path.chmod(0o755)
    os.utime(path, (1e9 + second, 1e9 + second))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize("release", RELEASES)
def test_the_newest_version_that_both_sides_know_is_asked_for(folder: Path, release: str) -> None:
    offered, agreed = RELEASES[release]
    install(folder, offered)
    assert json_answer("scontrol", "show", "x") == f"show x --json={agreed}\n".encode()
    json_answer("scontrol", "show", "x")
    assert len((folder / "asked").read_text().split()) == 3, "the list is asked for once"


def test_a_release_that_offers_none_is_refused_with_both_lists(folder: Path) -> None:
    install(folder, "v0.0.39 v0.0.40")
    with pytest.raises(EnvironmentLacks, match=r"v0\.0\.39, v0\.0\.40.* v0\.0\.42, .*v0\.0\.46"):
        json_answer("scontrol", "show", "x")


def test_an_upgrade_of_slurm_is_noticed(folder: Path) -> None:
    install(folder, "v0.0.42")
    assert json_format() == "v0.0.42"
    install(folder, "v0.0.43 v0.0.44", second=1)
    assert json_format() == "v0.0.44"
    # One that the time of the file does not show costs one answer.
    install(folder, "v0.0.43", second=1)
    with pytest.raises(Refusal, match="unable to find plugin"):
        json_answer("scontrol", "show", "x")
    assert json_answer("scontrol", "show", "x") == b"show x --json=v0.0.43\n"


def test_commands_that_print_no_list_choose_their_own_version(folder: Path) -> None:
    """A site's wrapper of scontrol may swallow the list."""
    install(folder, "")
    assert json_answer("scontrol", "show", "x") == b"plain\n"
