"""The training jobs with which the offload is proved: small, seeded, alike on CPU and GPU; each names its state."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

TOKENS = 50
CLASSES = 10
SAMPLES = 64


@dataclass(frozen=True)
class Job:
    """One job: ``step`` trains once and returns the loss; ``sources`` are all that it keeps on its device."""

    step: Callable[[], torch.Tensor]
    sources: list[tuple[str, object]]


@dataclass(frozen=True)
class Place:
    """Device and size of a job: ``scale`` multiplies its widths."""

    device: torch.device
    scale: float

    def width(self, full: int) -> int:
        """Return a width at this scale, a multiple of 8."""
        return max(8, int(full * self.scale) // 8 * 8)

    def randn(self, *shape: int) -> torch.Tensor:
        """Draw on the device, as a training script would."""
        return torch.randn(*shape, device=self.device)


def mlp(place: Place, *, dropout: float = 0.0) -> Job:
    """Plain SGD."""
    width = place.width(256)
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES)]
    model = nn.Sequential(*layers).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Job(lambda: _step(optimizer, lambda: model(place.randn(16, 32))), _named(model, optimizer))


class Residual(nn.Module):
    """The basic block of ResNet-18 and -34 (He et al., CVPR 2016, figure 2)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside))
        self.second = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        return functional.relu(self.second(functional.relu(self.first(images))) + self.shortcut(images))


def resnet18(place: Place) -> Job:
    """Eight residual blocks, SGD with momentum and weight decay, 32-pixel images (16 on the CPU)."""
    width = place.width(64)
    widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [
        Residual(inside, outside, 1 + (inside != outside))
        for inside, outside in zip([width, *widths], widths, strict=False)
    ]
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AvgPool2d(place_size(place) // 8), nn.Flatten())
    model.append(nn.Linear(8 * width, CLASSES)).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    size = place_size(place)
    return Job(lambda: _step(optimizer, lambda: model(place.randn(4, 3, size, size))), _named(model, optimizer))


def place_size(place: Place) -> int:
    """Return the edge of an image in pixels."""
    return 32 if place.device.type == "cuda" else 16


def transformer(place: Place) -> Job:
    """AdamW under autocast, with a gradient scaler, a schedule, dropout and clipped gradients."""
    model = _language_model(place, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=10)
    scaler = torch.amp.GradScaler(place.device.type)
    dtype = torch.float16 if place.device.type == "cuda" else torch.bfloat16

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(place.device.type, dtype):
            loss = _loss(model(_tokens(place)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        return loss.detach()

    return Job(step, [*_named(model, optimizer), ("scaler", scaler), ("scheduler", scheduler)])


def accumulation(place: Place) -> Job:
    """Three backward passes a step, and each is a boundary: gradients are part of the state."""
    model = _language_model(place, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True)
    passed = [0]

    def step() -> torch.Tensor:
        loss = _loss(model(_tokens(place)))
        loss.backward()
        passed[0] += 1
        if passed[0] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return Job(step, _named(model, optimizer))


class Tied(nn.Module):
    """An embedding and an output layer with one weight, a frozen layer between them, and a view kept as a buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.output = nn.Linear(width, TOKENS, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("rows", self.embedding.weight.detach()[:3])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        logits: torch.Tensor = self.output(torch.tanh(self.frozen(self.embedding(tokens))))
        return logits + self.rows.sum()


def tied(place: Place) -> Job:
    """Tied weights, frozen parameters, and an exponential moving average of the model that evaluates."""
    model = Tied(place.width(256)).to(place.device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        loss = _step(optimizer, lambda: model(_tokens(place)))
        average.update_parameters(model)
        with torch.no_grad():
            return loss + _loss(average(_tokens(place)))

    return Job(step, [*_named(model, optimizer), ("average", average)])


def loader(place: Place) -> Job:
    """Two loader processes that fetch ahead, and draw, while the state is away."""
    model = nn.Sequential(nn.Linear(32, place.width(256)), nn.ReLU(), nn.Linear(place.width(256), CLASSES))
    model.to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    data = torch.utils.data.DataLoader(
        Noisy(), batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=2
    )
    batches = _forever(data)
    return Job(lambda: _step(optimizer, lambda: model(next(batches).to(place.device))), _named(model, optimizer))


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples with noise that the worker draws."""

    def __len__(self) -> int:
        """Return how many there are."""
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one sample."""
        return torch.full((32,), index / SAMPLES) + 0.1 * torch.randn(32)


def ddp(place: Place, *, view: bool) -> Job:
    """One of several ranks, with dropout and different data each; the process group must be there.

    Where gradients are views of the buckets they are kept, as DDP's documentation advises, so that the buckets move.
    """
    width = place.width(256)
    layers = [nn.Linear(32, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, CLASSES)]
    inner = nn.Sequential(*layers).to(place.device)
    model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=view)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + distributed.get_rank())
    return Job(
        lambda: _step(optimizer, lambda: model(place.randn(8, 32)), keep_gradients=view), _named(model, optimizer)
    )


def fsdp(place: Place) -> Job:
    """One of several ranks that each keep a shard of parameters and optimizer state; all gather layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    width = place.width(256) + 1  # an odd one: shards are padded
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, CLASSES)).to(place.device)
    mesh = init_device_mesh(place.device.type, (distributed.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + distributed.get_rank())
    return Job(lambda: _step(optimizer, lambda: model(place.randn(8, 32))), _named(model, optimizer))


def optimized(place: Place, *, make: Callable[..., torch.optim.Optimizer], **options: Any) -> Job:
    """Two layers without biases under an optimizer that keeps more than momentum."""
    width = place.width(256)
    layers = [nn.Linear(32, width, bias=False), nn.ReLU(), nn.Linear(width, CLASSES, bias=False)]
    model = nn.Sequential(*layers).to(place.device)
    optimizer = make(model.parameters(), **options)
    return Job(lambda: _step(optimizer, lambda: model(place.randn(16, 32))), _named(model, optimizer))


JOBS: dict[str, Callable[[Place], Job]] = {
    "MLP, SGD": mlp,
    "MLP, dropout": functools.partial(mlp, dropout=0.3),
    "ResNet-18, SGD momentum": resnet18,
    "transformer, AdamW, AMP": transformer,
    "gradient accumulation": accumulation,
    "tied, frozen, EMA": tied,
    "2 loader workers": loader,
}
OPTIMIZERS: dict[str, Callable[[Place], Job]] = {
    "SGD, foreach": functools.partial(optimized, make=torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "Adam, foreach": functools.partial(optimized, make=torch.optim.Adam, foreach=True),
    "AdamW, fused": functools.partial(optimized, make=torch.optim.AdamW, fused=True),
    "AdamW, capturable": functools.partial(optimized, make=torch.optim.AdamW, capturable=True, foreach=True),
    "Adafactor": functools.partial(optimized, make=getattr(torch.optim, "Adafactor", torch.optim.Adagrad)),
    "Muon": functools.partial(optimized, make=getattr(torch.optim, "Muon", torch.optim.NAdam)),
}
"""Optimizers beyond those of the jobs; older versions of torch have other ones in the place of the last two."""
RANKED: dict[str, Callable[[Place], Job]] = {
    "DDP x2, gradient_as_bucket_view=False": functools.partial(ddp, view=False),
    "DDP x2, gradient_as_bucket_view=True": functools.partial(ddp, view=True),
    "FSDP x2 (fully_shard)": fsdp,
}
"""Jobs of several ranks, for which the process group must be there."""


def digest(job: Job) -> str:
    """Return a hash over all parameters, buffers and optimizer state, bit by bit."""
    found = hashlib.sha256()
    for name, thing in job.sources:
        _feed(found, name, thing.state_dict())  # type: ignore[attr-defined]
    return found.hexdigest()


def _feed(found: Any, name: str, value: object) -> None:
    """Add a state dict's part to a hash."""
    found.update(name.encode())
    if isinstance(value, dict):
        for key, child in value.items():
            _feed(found, str(key), child)
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            _feed(found, str(index), child)
    elif hasattr(value, "to_local"):  # a shard
        _feed(found, name, value.to_local())
    elif isinstance(value, torch.Tensor):
        found.update(value.detach().cpu().contiguous().reshape(-1).clone().view(torch.uint8).numpy().tobytes())
    else:
        found.update(repr(value).encode())


def _language_model(place: Place, *, dropout: float) -> nn.Module:
    """Return two encoder layers over an embedding."""
    width = place.width(256)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=dropout, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(TOKENS, width), encoder, nn.Linear(width, TOKENS)).to(place.device)


def _tokens(place: Place) -> torch.Tensor:
    """Draw a batch of tokens."""
    return torch.randint(0, TOKENS, (4, 16), device=place.device)


def _loss(output: torch.Tensor) -> torch.Tensor:
    """Return a loss that needs no labels."""
    return output.float().square().mean()


def _step(
    optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor], *, keep_gradients: bool = False
) -> torch.Tensor:
    """Train once; gradients are gone at the boundary, as zero_grad leaves them by default, unless they are kept."""
    loss = _loss(forward())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    return loss.detach()


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, object]]:
    """Return the two as attach() names them."""
    return [("model", model), ("optimizer", optimizer)]


def _forever(data: torch.utils.data.DataLoader[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from data
