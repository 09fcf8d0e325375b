"""The three wheels: their files, their dependencies, and each of them alone in an environment of its own."""

from __future__ import annotations

import configparser
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from client_peer import PATIENCE_S, Peer, Turns, running, slurm_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import PACKAGES, imported

ROOT = Path(__file__).resolve().parents[2]
CLIENT, AGENT, WHOLE = "cadenza-client", "cadenza-agent", "cadenza"
OLDEST = 9
"""Minor version of the oldest Python that the client supports."""
CLIENT_BYTES = 500_000
LIBRARY = "cadenza/sidecar/agent/addresses/libcadenza-addresses.so"

pytestmark = pytest.mark.packages


def pythons() -> Iterator[str]:
    """Yield an interpreter for each Python from 3.9 on that starts here, those of pyenv included."""
    for minor in range(OLDEST, 30):
        name = f"python3.{minor}"
        others = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/*/bin/{name}")
        for python in (shutil.which(name), *map(str, sorted(others))):
            if (
                python
                and subprocess.run([python, "-c", "import venv"], capture_output=True, check=False).returncode == 0
            ):
                yield python
                break


PYTHONS = list(pythons())


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by distribution."""
    command = [sys.executable, ROOT / "packaging/wheels.py", tmp_path_factory.mktemp("dist")]
    built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip((CLIENT, AGENT, WHOLE), map(Path, built.splitlines()), strict=True))


@pytest.fixture(scope="session")
def whole(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with all three wheels and what they require."""
    one = Environment(tmp_path_factory.mktemp("whole") / "venv")
    one.install(*wheels.values())
    needed = [str(need) for wheel in wheels.values() for need in required(wheel) if not need.marker]
    one.borrow([need for need in needed if not need.startswith("cadenza")])
    return one


class Environment:
    """A virtual environment without pip, network or packages."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
        self.bin = folder / "bin"

    def install(self, *wheels: Path) -> None:
        """Install wheels without their dependencies, by the pip of the environment that runs the tests."""
        self._pip("install", "--quiet", "--no-index", "--no-deps", *map(str, wheels))

    def installed(self) -> set[str]:
        """Return the names of the distributions."""
        return {one["name"] for one in json.loads(self._pip("list", "--format", "json"))}

    def consistent(self) -> str:
        """Return pip's word on the requirements of all distributions; it fails when one is not met."""
        return self._pip("check")

    def borrow(self, requirements: Iterable[str]) -> None:
        """Link distributions, and what they require, from the environment that runs the tests."""
        (site,) = self.bin.parent.glob("lib/python*/site-packages")
        waiting, known = list(requirements), set[str]()
        while waiting:
            wanted = Requirement(waiting.pop())
            name = canonicalize_name(wanted.name)
            if name in known or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            known.add(name)
            distribution = metadata.distribution(name)
            waiting += distribution.requires or ()
            for name in {
                file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}
            }:
                (site / name).symlink_to(Path(str(distribution.locate_file(name))))

    def run(self, *command: str) -> str:
        """Return the output of a command of the environment, which succeeds."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]], capture_output=True, text=True, env=clean(), check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def _pip(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def clean() -> dict[str, str]:
    """Return this process's environment without what would lead a Python or a job to other places."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SLURM_", "CADENZA_"))}


def files(wheel: Path) -> set[str]:
    return {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


def tracked(*folders: str) -> list[str]:
    command = ["git", "ls-files", *folders]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def required(wheel: Path) -> list[Requirement]:
    (name,) = (name for name in ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    text = ZipFile(wheel).read(name).decode()
    return [Requirement(found) for found in re.findall(r"^Requires-Dist: (.+)$", text, re.MULTILINE)]


def test_each_file_of_the_tree_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    elsewhere = ("slurm_plugin/spank", "slurm_plugin/lua")
    sources = ("sidecar/agent/addresses/addresses.", "sidecar/agent/addresses/Makefile")
    ours = [file for file in tracked(*PACKAGES) if not file.startswith(elsewhere + sources)]
    installed = {f"cadenza/{file}" for file in ours} | {LIBRARY}
    together = [file for wheel in wheels.values() for file in files(wheel)]
    assert sorted(together) == sorted(installed)


def test_a_tree_elsewhere_of_another_user_gives_the_same_bytes(wheels: dict[str, Path], tmp_path: Path) -> None:
    tree = tmp_path / "another" / "place"
    for name in tracked(*PACKAGES, "packaging", "setup.cfg", "LICENSE", "README.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tree / name)
        (tree / name).chmod(0o600)
    command, elsewhere = [sys.executable, tree / "packaging/wheels.py", tmp_path], {"TZ": "Asia/Tokyo"}
    subprocess.run(command, capture_output=True, env={**os.environ, **elsewhere}, umask=0o077, check=True)
    assert [one.name for one in wheels.values() if (tmp_path / one.name).read_bytes() != one.read_bytes()] == []


def test_the_clients_wheel_is_small_and_has_the_client_alone(wheels: dict[str, Path]) -> None:
    shared = {f"cadenza/sidecar/{name}" for name in ("__init__.py", "wire.py", "py.typed")}
    assert [wheels[name].stem.endswith("-py3-none-any") for name in (CLIENT, AGENT, WHOLE)] == [True, False, True]
    assert {file for file in files(wheels[CLIENT]) if not file.startswith("cadenza/sidecar/client/")} == shared
    assert wheels[CLIENT].stat().st_size < CLIENT_BYTES
    assert [one for one in required(wheels[CLIENT]) if not one.marker] == []


@pytest.mark.parametrize("name", [CLIENT, AGENT, WHOLE])
def test_the_dependencies_are_the_modules_that_are_imported(name: str, wheels: dict[str, Path]) -> None:
    of = metadata.packages_distributions()
    top = {
        module.partition(".")[0]
        for file in files(wheels[name]) if file.endswith(".py")
        for module in imported(ROOT / file.removeprefix("cadenza/"))
    }  # fmt: skip
    foreign = {module for module in top if module not in sys.stdlib_module_names and module != "cadenza"}
    wanted = {frozenset(map(str.lower, of.get(module, [module]))) for module in foreign}
    declared = {one.name for one in required(wheels[name]) if not one.name.startswith("cadenza")}
    assert [names for names in wanted if not names & declared] == []
    assert [one for one in declared if not any(one in names for names in wanted)] == []


def test_the_wheels_take_the_versions_of_the_tree(wheels: dict[str, Path]) -> None:
    tree = configparser.ConfigParser()
    tree.read(ROOT / "setup.cfg")
    text = tree["options"]["install_requires"] + "".join(tree["options.extras_require"].values())
    ranges = {one.name: one.specifier for one in map(Requirement, text.split())}
    version = tree["metadata"]["version"]
    for wheel in wheels.values():
        for one in required(wheel):
            ours = one.name.startswith("cadenza")
            assert (
                str(one.specifier) == f"=={version}" if ours else one.specifier == ranges.get(one.name, one.specifier)
            )


def test_the_systems_packages_have_the_same_version_and_depend_on_the_same_ones(wheels: dict[str, Path]) -> None:
    folder = ROOT / "packaging" / "debian"
    control = (folder / "control").read_text().replace("1:1.26", "1.26")  # numpy has an epoch there
    packages = {text.partition("\n")[0]: text for text in control.split("Package: ")[1:]}
    spec = (ROOT / "packaging" / "cadenza.spec").read_text()
    called = {"nvidia-ml-py": "pynvml", "pyzmq": "zmq"}
    for name, wheel in wheels.items():
        depends, _, rest = packages[name].partition("${misc:Depends}")
        for one in (one for one in required(wheel) if not one.marker and not one.name.startswith("cadenza")):
            debian = f"python3-{called.get(one.name, one.name)}"
            if one.name == "nvidia-ml-py":  # Debian has it in contrib, and Cadenza runs without it
                assert debian in rest
            else:
                version = str(one.specifier).replace(">=", ">= ")
                assert f"{debian} ({version})" in depends
                assert f"{debian} {version}" in spec
    (version,) = {str(one.specifier) for one in required(wheels[AGENT]) if one.name == CLIENT}
    version = version.removeprefix("==")
    assert (folder / "changelog").read_text().startswith(f"cadenza ({version}) ")
    assert f'#define CADENZA_VERSION "{version}"' in (ROOT / "slurm_plugin/spank/cadenza.h").read_text()


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).name)
def test_the_client_takes_turns_on_every_python(python: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    alone = Environment(tmp_path / "venv", python)
    alone.install(wheels[CLIENT])
    assert alone.installed() == {CLIENT}
    assert "offload.engine torch" in alone.run("python", str(Path(__file__).with_name("installed_client.py")))
    assert "does nothing" in alone.run("python", "-c", "from cadenza.sidecar import client; client.attach().boundary()")
    takes_turns([str(alone.bin / "python")], tmp_path)


@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).name)
def test_cadenza_run_brings_the_client_to_a_python_without_it(python: str, whole: Environment, tmp_path: Path) -> None:
    takes_turns([str(whole.bin / "cadenza"), "run", "--", python], tmp_path)


def takes_turns(python: list[str], folder: Path) -> None:
    """Let a job without torch yield twice."""
    peer, end = Peer(folder / "agent.sock"), folder / "end"
    turns = Turns(peer, [3, 6])
    with running(
        [*python, str(ROOT / "tests/client/client_job.py"), str(end)], envs=[slurm_environment(peer.path)]
    ) as (process,):
        turns.finish()
        end.touch()
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert [one["step"] for one in turns.arrived] == [3, 6]
    assert len(turns.yielded) == 2
    assert int(out) >= 6


def test_the_agents_wheel_starts_the_agent(wheels: dict[str, Path], tmp_path: Path) -> None:
    alone = Environment(tmp_path / "venv")
    alone.install(wheels[CLIENT], wheels[AGENT])
    alone.borrow([str(one) for one in required(wheels[AGENT]) if not one.marker and one.name != CLIENT])
    assert "No broken requirements" in alone.consistent()
    assert not {"numpy", "scipy", "torch"} & alone.installed()
    assert "agent of this host" in alone.run("cadenza-agent", "--help")
    assert metadata.version("cadenza") in alone.run("cadenza-agent", "--version")
    where = "from cadenza.sidecar.client.offload.addresses import preloaded; print(preloaded.path())"
    library = alone.run("python", "-c", where).strip()
    assert library.endswith(LIBRARY)
    ctypes.CDLL(library).cadenza_addresses_resume()


def test_cadenzas_wheel_starts_the_commands_and_the_service(whole: Environment) -> None:
    assert "No broken requirements" in whole.consistent()
    assert "Share GPUs between Slurm jobs" in whole.run("cadenza", "--help")
    assert "Usage: cadenzad" in whole.run("cadenzad", "--help")
    simulate = ("simulate", "--trace", str(ROOT / "examples/simulate/jobs.csv"), "--nodes", "2x4:16:128")
    profiles = ("--profiles", str(ROOT / "examples/simulate/profiles.json"))
    assert "avg_jct_h" in whole.run("cadenza", *simulate, *profiles, "--allocate", "opt", "--json")
