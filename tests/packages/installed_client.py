"""Import each module of the installed client that needs no framework, and run the examples in its docstrings.

Standard library only: it runs on every Python that the client supports. Prints the modules that need a framework.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

from cadenza.sidecar import client

FRAMEWORKS = frozenset({"lightning", "numpy", "pytorch_lightning", "torch", "transformers"})

failed, tried = 0, 0
for found in pkgutil.walk_packages(client.__path__, f"{client.__name__}."):
    if found.name.endswith(".sitecustomize"):  # it is only for the start of an interpreter
        continue
    try:
        module = importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if error.name not in FRAMEWORKS:
            raise
        print(found.name, error.name)
        continue
    result = doctest.testmod(module)
    failed, tried = failed + result.failed, tried + result.attempted
assert tried, "no example was run"
assert not failed, f"{failed} of {tried} examples failed"
