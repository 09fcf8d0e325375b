"""``cadenza web``: serves the pages until it is ended."""

from __future__ import annotations

import os
import pwd
import re
import socket
from pathlib import Path

import click

from cadenza.policies.core.errors import EnvironmentLacks
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.slurm_plugin.cli.common import config_option, say
from cadenza.slurm_plugin.service.job_access import JobAccess
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.service.store.reader import StoreReader

DEFAULT_LISTEN = "127.0.0.1:8852"
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\]):(\d{1,5})")


@click.command("web")
@click.argument("whatifs", metavar="[FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option("--listen", metavar="ADDRESS", default=DEFAULT_LISTEN, show_default=True,
              help="Port of this machine's own address, or the path of a socket.")  # fmt: skip
@click.option("--proxy", metavar="USER", help="The web server's user, whose X-Remote-User is believed at that socket.")
@config_option
def command(*, whatifs: Path | None, listen: str, proxy: str | None, config: Path | None) -> None:
    """Show the cluster, jobs, hosts and reports as web pages; they change nothing.

    On a port everyone sees how many GPUs are held and how many jobs wait, and no names. At a socket the kernel says
    who has connected: users see their own jobs, and those who may read the service's store see everything. FOLDER has
    saved pages of `cadenza whatif` and `cadenza report`.
    """
    # 1. Everything that can be missing, before anything is opened.
    store = Path(load_settings(config).service.store)
    StoreReader(store).close()
    try:
        proxy_uid = None if proxy is None else pwd.getpwnam(proxy).pw_uid
    except KeyError:
        raise ConfigError(f"--proxy {proxy}: this machine has no user of this name") from None
    if proxy is not None and not listen.startswith("/"):
        raise ConfigError("--proxy goes with the path of a socket: at a port everyone could call themselves anyone")
    if whatifs is not None and not whatifs.is_dir():
        raise ConfigError(f"{whatifs}: no folder")
    try:
        import uvicorn  # noqa: PLC0415 (an extra)

        from cadenza.slurm_plugin.web.viewers import Viewers  # noqa: PLC0415
        from cadenza.slurm_plugin.web.web_pages import Site  # noqa: PLC0415
        from cadenza.slurm_plugin.web.web_server import Server, configured  # noqa: PLC0415
    except ImportError as error:
        raise EnvironmentLacks(
            f"{error.name} is not installed; pip install 'cadenza[web]', or Debian's python3-starlette and "
            "python3-uvicorn"
        ) from None
    # 2. The socket, and the pages on it.
    link = opened(listen)
    site = Site(store, whatifs, SystemClock())
    settings = configured(Server(site, Viewers(JobAccess(store, site.clock), proxy_uid)).application())
    say(f"listening: {listen if listen.startswith('/') else f'http://{listen}'}")
    uvicorn.Server(settings).run([link])


def opened(listen: str) -> socket.socket:
    """Return the listening socket; raise ConfigError for any that other machines reach."""
    try:
        if listen.startswith("/"):
            link = socket.socket(socket.AF_UNIX)
            if Path(listen).is_socket():  # left over: its process is gone, or cannot be reached any more
                Path(listen).unlink()
            link.bind(listen)
            os.chmod(listen, 0o666)  # noqa: PTH101, S103 (the kernel says who connects)
            link.listen(128)
            return link
        if (found := LOOPBACK.fullmatch(listen)) is None:
            raise ConfigError(
                f"--listen {listen}: {DEFAULT_LISTEN} or another port of 127.0.0.1 or [::1], or a socket's path; "
                "other machines come through a web server"
            )
        link = socket.create_server((found[1].strip("[]"), int(found[2])),
                                    family=socket.AF_INET6 if found[1] == "[::1]" else socket.AF_INET)  # fmt: skip
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--listen {listen}: {error}") from None
    return link
