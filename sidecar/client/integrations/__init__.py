"""Callbacks for training frameworks; each module needs its framework, the client itself needs none.

``integrations.lightning`` and ``integrations.pytorch_lightning`` have a ``CadenzaCallback``,
``integrations.transformers`` a ``CadenzaTrainerCallback``. Accelerate needs none: its loops are part of the script.
"""

from __future__ import annotations

from cadenza.sidecar.client.errors import ClientError

__all__ = ["MissingFrameworkError"]


class MissingFrameworkError(ClientError, ImportError):
    """A callback was imported without its framework; the user must install the framework."""

    def __init__(self, framework: str, cause: ImportError) -> None:
        super().__init__(
            f"this callback needs {framework}, which cannot be imported here ({cause}): "
            f"pip install {framework}, or Cadenza's extra: pip install 'cadenza-client[frameworks]'"
        )
