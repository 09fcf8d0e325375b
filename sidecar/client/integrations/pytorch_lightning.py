"""``CadenzaCallback`` for ``pytorch_lightning.Trainer``."""

from __future__ import annotations

from cadenza.sidecar.client.integrations import MissingFrameworkError
from cadenza.sidecar.client.integrations.lightning_hooks import LightningHooks

try:
    from pytorch_lightning import Callback
except ImportError as error:
    raise MissingFrameworkError("pytorch-lightning", error) from error

__all__ = ["CadenzaCallback"]


class CadenzaCallback(LightningHooks, Callback):  # type: ignore[misc]  # untyped where the extra is not installed
    """Lets a Trainer's job take turns on its GPU: ``Trainer(callbacks=[CadenzaCallback()])``."""
