"""TOML settings: merged files, and errors that name the file and the key."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_rig import Agent

from cadenza.sidecar.agent_settings import AgentSettings, ExpertTable, load_settings
from cadenza.sidecar.config import DEFAULT_PATH, ConfigError, read


def write(directory: Path, text: str, name: str = "cadenza.toml") -> Path:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    assert AgentSettings().expert.service_timeout_s == 30
    assert AgentSettings(expert=ExpertTable(host="n7")).host_name == "n7"


def test_conf_d_wins_in_name_order_key_by_key(tmp_path: Path) -> None:
    main = write(tmp_path, '[agent]\nservice = "tcp://ctl:6820"\n[expert]\nheartbeat_s = 1\nlease_wait_s = 5\n')
    write(tmp_path, "[expert]\nheartbeat_s = 2\nlease_wait_s = 6\n", "conf.d/10-a.toml")
    write(tmp_path, "[expert]\nheartbeat_s = 3\n", "conf.d/20-b.toml")
    settings = load_settings(main)
    expert = settings.expert
    assert (settings.agent.service, expert.heartbeat_s, expert.lease_wait_s) == ("tcp://ctl:6820", 3.0, 6.0)
    _, origin = read(main)
    assert origin["expert", "lease_wait_s"].name == "10-a.toml"


def test_the_services_sections_are_left_alone(tmp_path: Path) -> None:
    main = write(tmp_path, '[service]\nnonsense = 1\n[guard]\n[sharing]\nslice_s = "x"\n[expert]\nhost = "n1"\n')
    assert load_settings(main).host_name == "n1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[expert]\nheartbeats = 2\n", "unknown key expert.heartbeats; did you mean heartbeat_s?"),
        ("[agnet]\n", "unknown section [agnet]; did you mean agent?"),
        ("host = 1\n", "unknown key host; known here: agent, expert, gandiva, guard, policy, profiles, service"),
        ('[expert]\nheartbeat_s = "2"\n', "expert.heartbeat_s: expected `float`, got `str`"),
        ("[expert]\nheartbeat_s = 0\n", "expert.heartbeat_s: expected `float` > 0"),
        ("[expert]\nsocket = 3\n", "expert.socket: expected `str`, got `int`"),
        ('[agent]\nservice = "ctl"\n', "agent.service: expected `str` matching regex"),
        ("agent = 3\n", "agent: expected `object`, got `int`"),
        ("[agent\n", "not TOML"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, "[agent]\n")
    extra = write(tmp_path, text, "conf.d/x.toml")
    with pytest.raises(ConfigError) as caught:
        load_settings(tmp_path / "cadenza.toml")
    assert str(caught.value).startswith(f"{extra}:")
    assert message in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read"):
        load_settings(tmp_path / "nowhere.toml")
    (tmp_path / "x.toml").write_bytes(b"# \xd0")
    with pytest.raises(ConfigError, match=r"x\.toml: not UTF-8 text \(byte 2 is 0xd0\)"):
        load_settings(tmp_path / "x.toml")


def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cadenza.sidecar.agent", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)


DEFAULTS = (DEFAULT_PATH, Path(ExpertTable().state_dir), AgentSettings().runtime)


@pytest.mark.skipif(any(path.exists() for path in DEFAULTS), reason="Cadenza is installed on this machine")
def test_an_agent_without_settings_ends_with_2_and_leaves_nothing_behind() -> None:
    run = agent()
    assert run.returncode == 2
    assert re.fullmatch(
        rf"cadenza-agent: {DEFAULT_PATH} is missing: Cadenza is not set up here; .*--config\n", run.stderr
    )
    assert [path for path in DEFAULTS if path.exists()] == []


def test_bad_settings_end_with_2(tmp_path: Path) -> None:
    run = agent("--config", str(write(tmp_path, "[expert]\nhots = 3\n")))
    assert run.returncode == 2
    assert run.stderr == f"cadenza-agent: {tmp_path}/cadenza.toml:2: unknown key expert.hots; did you mean host?\n"


def test_a_bad_key_file_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    for name in ("agents/n1.key_secret", "service.key"):
        write(tmp_path, "metadata\n", name)
    text = f'[agent]\nservice = "tcp://127.0.0.1:1"\nkeys = "{tmp_path}"\n[expert]\nhost = "n1"\n'
    text += f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/run/s"\n'
    run = agent("--config", str(write(tmp_path, text)))
    assert run.returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agents", "cadenza.toml", "service.key"]
    assert "agents/n1.key_secret: not a CURVE certificate" in run.stderr


def test_a_socket_that_cannot_be_made_ends_with_3(tmp_path: Path) -> None:
    write(tmp_path, "", "file")
    text = f'[expert]\nstate_dir = "{tmp_path}"\nsocket = "{tmp_path}/file/s"\n'
    run = agent("--config", str(write(tmp_path, text)))
    assert run.returncode == 3
    assert f"socket {tmp_path}/file/s" in run.stderr


def test_a_spoilt_lease_file_is_named_and_put_aside(tmp_path: Path) -> None:
    """It is a hint: without it the host itself says who has the GPUs."""
    write(tmp_path, "{", "leases.json")
    running = Agent(tmp_path, state_dir=str(tmp_path)).up()
    assert running.down(signal.SIGTERM) == 0
    assert "leases.json: cannot be read" in running.log()
    assert (tmp_path / "leases.unreadable").read_text() == "{"


def test_version() -> None:
    assert agent("--version").stdout.startswith("cadenza-agent, version ")
