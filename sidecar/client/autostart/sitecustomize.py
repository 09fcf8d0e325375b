"""Runs in every Python process under ``cadenza run``: prepares attach, then runs the hidden sitecustomize."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def _next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides, as Python would without this one."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    from cadenza.sidecar.client.bootstrap.auto import install
except ImportError as error:
    sys.stderr.write(f"cadenza run: {sys.executable} cannot attach, install Cadenza in it: {error}\n")
else:
    install()
_next_sitecustomize()
