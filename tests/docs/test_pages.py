"""The pages name files, settings and commands that exist, and the snippet that replays a round works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.sidecar.agent.daemon import ALIVE_S
from cadenza.sidecar.client.bootstrap.run_script import OPTIONS
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.service.settings import Settings, policy, to_record
from cadenza.slurm_plugin.service.settings_reference import rows
from cadenza.slurm_plugin.service.store.writer import SqliteStore

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import month_chart
import record_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(ROOT.glob("docs/**/*.md"))
FOLDERS = "policies|profiler|sidecar|slurm_plugin|examples|benchmarks|container|tests|docs"
PATH = re.compile(rf"(?<![\w/.\]-])((?:{FOLDERS})/[\w./*@-]*\w(?:\.\w+)?/?)")
SETTINGS = {(row.section, row.key) for row in rows()}
SECTIONS = "|".join(sorted({section for section, _ in SETTINGS}))
KEY = re.compile(rf"\[({SECTIONS})\]`?,? `?([a-z_]+)\b(?= =|`)|`({SECTIONS})\.((?!key)[a-z_]+)`")
COMMAND = re.compile(r"(?:^|`|\$ |bin/)cadenza (?!apply )([a-z][a-z-]*)([^`\n]*)", re.MULTILINE)
EXTENDING = "extending.md"
RULES = "slurm-rules.md"
SITE_RULES = ROOT / "tests" / "cluster" / "test_site_rules.py"


def found_in(pattern: str, *files: Path) -> set[str]:
    return {name for file in files for name in re.findall(pattern, file.read_text(), re.MULTILINE)}


TESTS = found_in(r"^def (test_\w+)", *ROOT.glob("tests/**/*.py"))
SCENARIOS = found_in(r'^    "(.+)": Scenario\(', SITE_RULES)


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}.*?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def new_files(text: str) -> set[str]:
    return set(re.findall(r'title="([^:"]+)"', text))


def test_the_documents_are_short_enough_to_be_read():
    texts = [(ROOT / "README.md").read_text(), *(page.read_text() for page in ROOT.glob("docs/**/*.md"))]
    assert sum(len(text.split()) for text in texts) <= 32_000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_file_named_on_a_page_exists(page: Path):
    text = page.read_text()
    named = {found.rstrip("/") for found in PATH.findall(text)} - new_files(text)
    assert [name for name in sorted(named) if not list(ROOT.glob(name))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_setting_named_on_a_page_exists(page: Path):
    text = page.read_text()
    named = {(a or c, b or d) for a, b, c, d in KEY.findall(text)}
    for block in code_blocks(text, "toml"):
        tables = {name: value for name, value in tomllib.loads(block).items() if isinstance(value, dict)}
        named |= {(section, key) for section, keys in tables.items() for key in keys if section in SECTIONS.split("|")}
    assert sorted(named - SETTINGS) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_command_and_option_named_on_a_page_exists(page: Path):
    for name, rest in COMMAND.findall(page.read_text()):
        command = main.get_command(click.Context(main), name)
        assert command is not None, f"cadenza {name}"
        words = rest.partition(" -- ")[0].partition("#")[0].split()
        while isinstance(command, click.Group) and words and "|" not in words[0]:
            command = command.get_command(click.Context(command), words.pop(0))
            assert command is not None, f"cadenza {name} {rest}"
        if isinstance(command, click.Group):
            continue
        known = {option for item in command.params for option in (*item.opts, *item.secondary_opts)} | {"--help"}
        known |= set(OPTIONS) if name == "run" else set()  # which the client reads, in the environment of the script
        unknown = set(re.findall(r"(?<![\w='-])--[a-z-]+", " ".join(words))) - known
        assert not unknown, f"cadenza {name}: {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_test_named_on_a_page_exists(page: Path):
    text = page.read_text()
    rows = set(re.findall(r"`\[([^]`]+)\]`", text)) if page.name == RULES else set()
    assert sorted(set(re.findall(r"`(test_\w+)`", text)) - TESTS) == []
    assert sorted(rows - SCENARIOS) == []


def test_the_page_on_slurms_rules_has_a_row_for_each_rule_that_is_tested_on_a_cluster():
    assert set(re.findall(r"`\[([^]`]+)\]`", (ROOT / "docs" / RULES).read_text())) == SCENARIOS


def test_each_figure_of_the_first_pages_stands_in_the_measurements():
    measured = record_tables.filled((ROOT / "docs/measurements.md").read_text(), ROOT)
    for page in ("README.md", "docs/index.md", "docs/questions.md"):
        text = (ROOT / page).read_text()
        figures = set(re.findall(r"\d+\.\d+(?=\u00d7)|\d+\.\d+ times|\d+\.\d+ s\b|\d+\.\d+ µs", text))
        assert sorted(found for found in figures if found.removesuffix(" times") not in measured) == [], page
        assert sorted(name for name in re.findall(r"benchmarks/\w+/\w+\.py", text) if name not in measured) == [], page


@pytest.mark.slow
def test_the_first_example_shows_the_shipped_policy_on_a_cluster_with_a_queue():
    pages = [(ROOT / name).read_text() for name in ("docs/get-started.md", "docs/simulate.md")]
    first = [re.findall(r"cadenza (simulate .*?)(?: +#.*)?$", text, re.MULTILINE)[0] for text in pages]
    assert first[0] == first[1]
    done = CliRunner().invoke(main, [*first[0].split(), "--json"])
    found = json.loads(done.stdout)
    assert found["policy"] == "levels/none/preemption"
    assert found["ratio_to_baseline"]["avg_jct_h"] < 0.95
    assert f"{found['ratio_to_baseline']['avg_jct_h']:.2f}" in pages[0]
    assert found["ratio_to_baseline"]["wait_1_gpu_h"] < 0.1


def test_each_command_of_a_record_exists():
    text = (ROOT / "benchmarks/results/records.toml").read_text()
    named = {found.rstrip("/") for found in PATH.findall(text)}
    assert sorted(name for name in named if not list(ROOT.glob(name))) == []


def test_the_chart_of_the_first_page_is_drawn_from_the_records():
    assert (ROOT / "docs/month.svg").read_text() == month_chart.draw()


@pytest.mark.parametrize("changed", [False, True])
def test_the_snippet_replays_a_round_in_a_debugger(tmp_path: Path, changed: bool):
    settings, snapshot = Settings(), ClusterSnapshot(100.0, (), ())
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    store.use_settings(to_record(settings))
    decision: Decision = policy(settings)(snapshot, Memory())
    store.begin(snapshot, decision, (), Memory())
    replay, change = code_blocks((ROOT / "docs/troubleshooting.md").read_text(), "python")
    if changed:
        replay = replay.replace("decide = policy(from_record(found.settings))", f"{change}decide = policy(settings)")
    (tmp_path / "replay_round.py").write_text(replay)
    command, typed = [sys.executable, "replay_round.py"], "next\np found.number\ncontinue\n"
    result = subprocess.run(command, cwd=tmp_path, input=typed, capture_output=True, text=True, check=True)
    assert "(Pdb) 1\n" in result.stdout
    assert ("True" in result.stdout.splitlines()[-1]) or changed


# --- Units ---------------------------------------------------------------------------------------------


def unit(name: str) -> dict[str, str]:
    """Return the section [Service] of a unit file; of a key that stands twice, the last value."""
    lines = (ROOT / "docs" / "systemd" / name).read_text(encoding="utf-8").split("[Service]")[1].splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_each_daemon_has_directories_of_its_own_and_files_enough() -> None:
    """Stopping one must not remove the other's socket, and the service's user must own nothing that root trusts."""
    service, agent, defaults = unit("cadenzad.service"), unit("cadenza-agent.service"), Settings()
    for key, root in (("RuntimeDirectory", "/run"), ("StateDirectory", "/var/lib")):
        assert service[key] != agent[key]
        ours = {defaults.service.store, defaults.expert.jobs_socket}
        assert any(path.startswith(f"{root}/{service[key]}/") for path in ours)
        theirs = {defaults.expert.socket, defaults.expert.state_dir + "/"}
        assert any(path.startswith(f"{root}/{agent[key]}/") for path in theirs)
    assert agent["RuntimeDirectoryPreserve"] == "yes", "jobs and the plugin find the socket's directory in a restart"
    assert service["LimitNOFILE"] == agent["LimitNOFILE"] == "65536"
    assert float(agent["WatchdogSec"]) >= 10 * ALIVE_S


def test_no_port_is_one_of_slurms_daemons() -> None:
    """In order: slurmctld, slurmd, slurmdbd, slurmrestd; lane 0 is a slurmd."""
    guide = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("install.md", "second-lane.md"))
    used = [*re.findall(r"Port=(\d+)", guide), *re.findall(r"tcp://\S+:(\d+)", guide + Settings().service.bind)]
    assert len(used) >= 4
    assert {int(port) for port in used} & {6817, 6818, 6819, 6820} == {6818}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd's tools")
def test_systemd_accepts_the_units_and_how_they_are_confined(tmp_path: Path) -> None:
    """The commands of the units need not be installed here."""
    names = []
    for file in (ROOT / "docs" / "systemd").iterdir():
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        (tmp_path / file.name).write_text(text)
        names.append(str(tmp_path / file.name.replace("@", "@gpu1-l1")))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    for name, exposure in (("cadenzad", 40), ("cadenza-relay", 30), ("cadenza-agent", 60)):
        command = ["systemd-analyze", "security", "--offline=true", f"--threshold={exposure}"]
        rated = subprocess.run([*command, tmp_path / f"{name}.service"], capture_output=True, text=True, check=False)
        assert rated.returncode == 0, rated.stdout
