"""Runs in every Python process under ``cadenza run``: prepares attach, then runs the hidden sitecustomize."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIDECAR = HERE.parents[1]
OLDEST = (3, 9)
"""The oldest Python that the client runs on."""


class ClientFinder:
    """Import hook for a Python in which Cadenza is not installed: finds the client that ``cadenza run`` belongs to.

    The directory that holds it does not join ``sys.path``, because that has other packages, for another Python.
    """

    @staticmethod
    def find_spec(name: str, *_path_and_target: object) -> ModuleSpec | None:
        """Return the spec of the client's two outer packages, None for all others."""
        if name == "cadenza":
            return ModuleSpec(name, None, is_package=True)
        if name == "cadenza.sidecar":
            return importlib.util.spec_from_file_location(name, SIDECAR / "__init__.py")
        return None


def _next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, as Python would without this one."""
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if sys.version_info < OLDEST:
    sys.stderr.write(f"cadenza run: {sys.executable} is too old to attach: Python 3.9 or later is needed\n")
else:
    sys.meta_path.append(ClientFinder)
    try:
        from cadenza.sidecar.client.bootstrap.auto import install
        from cadenza.sidecar.client.bootstrap.script_saves_options import watch
    except ImportError as error:
        sys.stderr.write(f"cadenza run: {sys.executable} cannot attach: {error}\n")
    else:
        install()
        watch()
_next_sitecustomize()
