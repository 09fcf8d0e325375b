"""Trial of each kind of object, once: the state that is saved of it is loaded into a copy, and must be there then.

The copies are in host memory, at most LIMIT_BYTES of tensors each; a few parameters stand for all of one of torch's
optimizers. An object that is larger, or that cannot be copied, is not tried. No trial begins LIMIT_S after the first.
Objects that train and are in no keeper, such as an optimizer made later than it, are named.
"""

from __future__ import annotations

import collections
import copy
import gc
import io
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from cadenza.sidecar.client import rng_state
from cadenza.sidecar.client.checkpoints.optimizers import OptimizerPart
from cadenza.sidecar.client.checkpoints.parts import ModelPart, Part, StatefulPart, tensors_in
from cadenza.sidecar.client.checkpoints.staging import Staging, is_sharded
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session import compiled_steps
from cadenza.sidecar.client.session.save_points import Stamp
from cadenza.sidecar.client.zip_equal import zip_equal

LIMIT_BYTES = 256 << 20
LIMIT_S = 10.0
MAX_OBJECTS = 100_000
"""Objects inside one that are looked through for its tensors."""
_OWN_FORM = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict", "get_extra_state")
RARER = 4
"""A look goes through all objects of the process, which takes tens of milliseconds; so many times later is the next."""
SCHEDULERS = (LRScheduler, ReduceLROnPlateau)
SCHEDULE_STEPS, SCHEDULE_LOOKS = 3, 16
"""Steps in a row, from the first on, at which a late scheduler was late; and boundaries at which that is looked for."""
LAST = "call boundary() last in a step"

_log = logging.getLogger("cadenza.client")
_told: set[str] = set()


class NotTriedError(Exception):
    """An object is too large, or cannot be copied; never leaves this module."""


class RoundTrips:
    """The trials of a keeper's parts; ``failures`` are sentences on those that cannot be restored."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._left = {(type(part), type(part.thing)): (name, part) for name, part in reversed([*parts.items()])}
        self.failures: list[str] = []
        self._looks = 0

    @property
    def left(self) -> bool:
        """True while a kind of object has not been tried; optimizers have no state before their first step."""
        return bool(self._left)

    def run(self) -> None:
        """Try what is left and has state; random numbers stay as they are.

        Whether an optimizer without state has some elsewhere is looked for less and less often.
        """
        self._looks += 1
        seldom = not self._looks & (self._looks - 1)
        due = [(kind, one) for kind, one in self._left.items() if seldom or getattr(one[1].thing, "state", True)]
        if not due:
            return
        began, before = monotonic_ns(), rng_state.capture()
        try:
            for kind, (name, part) in due:
                if (monotonic_ns() - began) / 1e9 > LIMIT_S:
                    return
                if self._try(name, part):
                    del self._left[kind]
        finally:
            rng_state.restore(before)

    def _try(self, name: str, part: Part) -> bool:
        """Try one object; return False if it has no state yet."""
        what = type(part.thing).__qualname__
        try:
            if not has_state(part) and not hidden_state(part.thing):
                return False
            reason = difference_of(name, part)
        except NotTriedError as error:
            _log.info("%s: whether a %s can be restored was not tried: %s", name, what, error)
            return True
        except Exception as error:  # noqa: BLE001 - the object's own code
            reason = f"{type(error).__name__}: {error}"
        if reason:
            self.failures.append(f"{name}: what was saved of a {what} cannot be restored: {reason}")
            _log.warning("%s: no checkpoint is requested from this job", self.failures[-1])
        return True


def has_state(part: Part) -> bool:
    """Return whether an object has something that could be lost; an optimizer before its first step has not."""
    thing = part.thing
    if not isinstance(thing, optim.Optimizer):
        return True
    kept = {key: value for key, value in thing.state_dict().items() if key != "param_groups"}
    return next(iter(tensors_in(kept)), None) is not None


def difference_of(name: str, part: Part) -> str:
    """Return how an object differs after its state was saved and loaded into a copy; "" if it does not."""
    thing = part.thing
    if isinstance(part, OptimizerPart):
        return hidden_state(thing) or _tried(name, *_few_parameters(thing))
    if isinstance(part, ModelPart):
        found = (_tried(f"{name}: {inner}" if inner else name, ModelPart(name, module), ModelPart(name, other))
                 for inner, module, other in _own_modules(thing))  # fmt: skip
        return next(filter(None, found), "")
    if isinstance(part, StatefulPart):
        if isinstance(thing, DataLoader) or type(thing).__module__.startswith("torchdata"):
            raise NotTriedError("a copy of it would start workers")
        return hidden_state(thing) or _tried(name, part, StatefulPart(name, _copy(thing, thing.state_dict())))
    return ""  # tensors and plain values: this package's own code


def _tried(name: str, source: Part, target: Part) -> str:
    """Save one part, restore it into another, and return how they differ."""
    staging = Staging(keep=False)
    staging.begin()
    captured = staging.take(source.capture(), name)
    staging.finish()
    file = io.BytesIO()
    torch.save(captured, file)
    file.seek(0)
    # As a restore reads it: objects whose loading runs code are refused here already.
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if "devices" in saved:
        saved["devices"] = ["cpu" for _ in saved["devices"]]
    target.check(saved)
    target.restore(saved, {})
    return _difference(captured["state"], target.capture()["state"], "its state")


# --- copies -------------------------------------------------------------------------------------------------


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory, of a sharded one of this rank's part."""
    plain: Any = tensor.detach()
    plain = plain.to_local() if is_sharded(plain) else plain
    made: torch.Tensor = plain.to("cpu", copy=True)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _few_parameters(optimizer: optim.Optimizer) -> tuple[OptimizerPart, OptimizerPart]:
    """Return two parts of copies of an optimizer with the smallest parameter of each kind, one with state."""
    groups: list[list[torch.Tensor]] = []
    for group in optimizer.param_groups:
        smallest: dict[Any, torch.Tensor] = {}
        for param in group["params"]:
            kind = (param.dim(), param.dtype, tuple(map(str, optimizer.state.get(param, {}))))
            if kind not in smallest or param.numel() < smallest[kind].numel():
                smallest[kind] = param
        groups.append([*smallest.values()])
    chosen = [param for group in groups for param in group]
    nbytes = sum(tensor.nbytes for param in chosen for tensor in (param, *tensors_in(optimizer.state.get(param, {}))))
    if nbytes > LIMIT_BYTES:
        raise NotTriedError(f"its smallest parameters have {nbytes >> 20} MB with their state")
    made = []
    for filled in (True, False):
        params = {id(param): _on_host(param) for param in chosen}
        new = type(optimizer).__new__(type(optimizer))
        vars(new).update(vars(optimizer))
        new.param_groups = [
            {**_hosted({key: value for key, value in group.items() if key != "params"}),
             "params": [params[id(param)] for param in few]}
            for group, few in zip_equal(optimizer.param_groups, groups)
        ]  # fmt: skip
        new.state = collections.defaultdict(dict)
        for param in chosen if filled else ():
            if param in optimizer.state:
                new.state[params[id(param)]] = _hosted(optimizer.state[param])
        made.append(OptimizerPart("optimizer", new))
    return made[0], made[1]


def _hosted(value: Any) -> Any:
    """Return a tree with copies of its tensors in host memory."""
    if isinstance(value, torch.Tensor):
        return _on_host(value)
    if isinstance(value, dict):
        return {key: _hosted(item) for key, item in value.items()}
    return type(value)(_hosted(item) for item in value) if type(value) in (list, tuple) else value


def _copy(thing: Any, state: Any) -> Any:
    """Return a deep copy of an object in host memory, with other numbers in the tensors of its state."""
    if any(map(is_sharded, tensors_in(state))):
        raise NotTriedError("it has sharded tensors")
    memo: dict[int, Any] = {}
    if not isinstance(thing, optim.Optimizer):
        for one in objects_in(thing, optim.Optimizer):  # a scheduler's: only its groups matter
            memo[id(one)] = _bare(one)
    tensors = list(objects_in(thing, torch.Tensor, memo))
    nbytes = sum(one.nbytes for one in tensors)
    if nbytes > LIMIT_BYTES:
        raise NotTriedError(f"it has {nbytes >> 20} MB of tensors")
    in_state = {id(one) for one in tensors_in(state)} | {_memory_of(one) for one in tensors_in(state)}
    for tensor in tensors:
        memo[id(tensor)] = made = _on_host(tensor)
        if id(tensor) in in_state or (_memory_of(tensor) in in_state and not isinstance(tensor, nn.Parameter)):
            with torch.no_grad():
                made.copy_(~made if made.dtype == torch.bool else made + 1)
    # An optimizer's own copying leaves out all attributes but those of the base class.
    shells = [one for one in (thing, *objects_in(thing, optim.Optimizer)) if isinstance(one, optim.Optimizer)]
    shells = [one for one in shells if id(one) not in memo]
    memo.update({id(one): type(one).__new__(type(one)) for one in shells})
    try:
        for one in shells:
            vars(memo[id(one)]).update(copy.deepcopy(vars(one), memo))
        made_thing = copy.deepcopy(thing, memo)
    except Exception as error:
        raise NotTriedError(f"it cannot be copied: {error}") from error
    if made_thing is thing:
        raise NotTriedError("it cannot be copied")
    return made_thing


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the part of memory that a tensor is: a state dict has detached tensors of the same memory."""
    plain: Any = tensor.detach()
    plain = plain.to_local() if is_sharded(plain) else plain
    return plain.device, plain.data_ptr(), tuple(plain.shape), plain.dtype


def _bare(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return an optimizer with the numbers of its groups, and without parameters and state."""
    new = type(optimizer).__new__(type(optimizer))
    vars(new).update(vars(optimizer))
    if isinstance(vars(optimizer).get("param_groups"), list):
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        new.param_groups, new.state = _hosted(groups), collections.defaultdict(dict)
    return new


def _own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield name, module and copy of the outermost modules that make or load a state dict in a way of their own."""
    found: list[str] = []
    for name, module in model.named_modules():
        kind = type(module)
        own = any(getattr(kind, form) is not getattr(nn.Module, form) for form in _OWN_FORM)
        inside = any(not outer or name.startswith(outer + ".") for outer in found)
        if own and not kind.__module__.startswith("torch.") and not inside:
            found.append(name)
            yield name, module, _copy(module, module.state_dict())


def objects_in(thing: Any, kind: type, known: Iterable[int] = ()) -> Iterator[Any]:
    """Yield the objects of a kind that an object has in its attributes and containers."""
    seen, todo = {*known}, [thing]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type)):
            continue
        seen.add(id(one))
        if len(seen) > MAX_OBJECTS:
            raise NotTriedError(f"it has more than {MAX_OBJECTS} objects inside")
        if isinstance(one, kind) and one is not thing:
            yield one
        if isinstance(one, torch.Tensor):
            todo += [one.grad] if one.is_leaf and one.grad is not None else []
            continue
        if isinstance(one, dict):  # another mapping may read a file for each of its values
            todo += [*dict.keys(one), *dict.values(one)]
        elif isinstance(one, (list, tuple, set, frozenset, collections.deque)):
            todo += [*one]
        todo += [*getattr(one, "__dict__", {}).values()]
        todo += [getattr(one, slot, None) for slot in _slots(type(one))]
        todo += [one.__self__] if isinstance(one, MethodType) else []


def _slots(kind: type) -> Iterator[str]:
    """Yield the names of a class's slots."""
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


# --- comparison ---------------------------------------------------------------------------------------------


def hidden_state(thing: Any) -> str:
    """Return a sentence on an optimizer's state that its state dict lacks: moments of its own or of one inside it."""
    if not isinstance(thing, optim.Optimizer):
        return ""
    params = [param for group in thing.param_groups for param in group["params"]]
    saved = [*tensors_in(thing.state_dict())]
    known = {id(one) for one in params} | {id(one.grad) for one in params} | {id(one) for one in saved}
    memory = {_memory_of(one) for one in saved}
    shapes = {one.shape for one in params if one.numel() > 1}
    for name, value in vars(thing).items():
        if name in ("state", "param_groups", "defaults"):
            continue
        inside = (value, *objects_in(value, optim.Optimizer, {id(thing)}))
        inner = [one for one in inside if isinstance(one, optim.Optimizer)]
        candidates = [tensor for one in inner for tensor in tensors_in({**one.state})]
        candidates += [tensor for tensor in tensors_in(value) if tensor.shape in shapes]
        for tensor in candidates:
            if id(tensor) in known or _memory_of(tensor) in memory or any(_equal(tensor, one) for one in saved):
                continue
            return f"its state_dict() lacks the state in .{name}"
    return ""


def _difference(saved: Any, found: Any, name: str) -> str:
    """Return where two states differ first; "" if they are the same, bit for bit."""
    if isinstance(saved, torch.Tensor) or isinstance(found, torch.Tensor):
        both = isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor)
        return "" if both and _equal(saved, found) else f"{name} is not as it was saved"
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        if absent := saved.keys() - found.keys():
            return f"{name} lacks {min(map(str, absent))}"
        return next(filter(None, (_difference(saved[key], found[key], f"{name}[{key!r}]") for key in saved)), "")
    if isinstance(saved, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(saved) != len(found):
            return f"{name} has {len(found)} entries instead of {len(saved)}"
        pairs = zip_equal(saved, found)
        return next(filter(None, (_difference(*pair, f"{name}[{index}]") for index, pair in enumerate(pairs))), "")
    nan = isinstance(saved, float) and isinstance(found, float) and math.isnan(saved) and math.isnan(found)
    return "" if nan or bool(saved == found) else f"{name} is {found!r} instead of {saved!r}"[:300]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same form and numbers, NaN being one of them."""
    one, other = one.detach(), other.detach()
    if is_sharded(one) or is_sharded(other):
        return one is other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return bool(torch.allclose(one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True))


# --- what is in no keeper -----------------------------------------------------------------------------------


class LeftOut:
    """Compares a process's training with what its keepers hold: where another optimizer steps, and now and then."""

    def __init__(self) -> None:
        self._buffers: dict[str, Stamp] | None = None
        self._samples, self._next = 0, 1
        self._known: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()

    def look(self, stepping: Sequence[optim.Optimizer], held: Iterable[object]) -> None:
        """Warn of optimizers that step, of their schedulers and of their parameters that nothing held has."""
        self._samples += 1
        if self._samples < self._next and all(optimizer in self._known for optimizer in stepping):
            return
        self._next = RARER * self._samples
        self._known.update(stepping)
        try:
            self._compare(stepping, held)
        except NotTriedError:
            return
        except Exception as error:  # noqa: BLE001 - it runs in the user's step, reads the user's objects, and only warns
            _log.debug("what a restore leaves out is not known: %s: %s", type(error).__name__, error)

    def look_at_buffers(self, modules: Iterable[nn.Module]) -> None:
        """Warn, at the second look, of buffers that no checkpoint has and that have changed since the first."""
        if self._buffers is not None and not self._buffers:
            return
        found = {
            f"{name}.{key}".lstrip("."): tensor
            for root in modules
            for name, module in root.named_modules()
            for key, tensor in _unsaved(module)
        }
        before, self._buffers = self._buffers, {}
        if before is None:
            self._buffers = {name: Stamp(buffer) for name, buffer in found.items()}
            return
        for name, buffer in found.items():
            if name in before and not before[name].same(buffer):
                _tell(f"the tensor {name}, which changes and is not in the state_dict() of its module; give it as own=")

    def _compare(self, stepping: Sequence[optim.Optimizer], held: Iterable[object]) -> None:
        kept = _reached(held)
        for optimizer in stepping:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            absent = sum(id(param) not in kept for param in params)
            if id(optimizer) not in kept:
                _tell(f"the state of an optimizer that steps ({type(optimizer).__qualname__}); give it as optimizer=")
            elif 0 < absent < len(params):  # where all are absent they are copies of its own
                _tell(f"{absent} parameters that {type(optimizer).__qualname__} trains; give their module as model=")
        ids = {id(optimizer) for optimizer in stepping}
        names = [_names_of(one) for one in held if isinstance(one, nn.Module)]
        for thing in gc.get_objects():
            if issubclass(type(thing), SCHEDULERS) and id(thing) not in kept and id(thing.optimizer) in ids:
                _tell(f"the state of a {type(thing).__qualname__}; give it as scheduler=")
            averages = issubclass(type(thing), AveragedModel) and _names_of(thing.module) in names
            if averages and not {id(one) for one in thing.parameters()} <= kept:
                _tell("an averaged model; give it as own=")


def _names_of(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters()}


def _tell(what: str) -> None:
    """Warn once of something that a restore leaves out."""
    if what not in _told:
        _told.add(what)
        _log.warning("a restore will not bring back %s of client.checkpoint(), or make the keeper after it", what)


def _unsaved(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a module keeps from step to step, and no state dict has: buffers and plain attributes.

    One that is a function of parameters, as those of weight_norm, or still part of a graph, is made anew.
    """
    parameters = vars(module)["_parameters"]
    for key in (*module._non_persistent_buffers_set, *vars(module)):  # noqa: SLF001
        value = getattr(module, key, None)
        made = parameters.keys() & {f"{key}_g", f"{key}_orig"}
        if isinstance(value, torch.Tensor) and value.grad_fn is None and not made:
            yield key, value


class ScheduleOrder:
    """Learns from a job's first steps whether a schedule is a step behind at each boundary.

    A scheduler's step that follows ``boundary()`` in the script would be missing in a checkpoint of that boundary.
    """

    def __init__(self, things: Iterable[object]) -> None:
        self._schedulers = [one for one in things if isinstance(one, SCHEDULERS)]
        self.late = ""
        """A sentence on the scheduler; "" while none is known to be late."""
        self._end: Callable[[], None] | None = None
        self._looks = 0
        self._before: list[Any] = []
        """The schedulers' counts at the last boundary, at the first step since, and at the last one."""
        self._first: dict[int, Any] = {}
        self._last: dict[int, Any] = {}
        self._times: collections.Counter[int] = collections.Counter()

    def look(self, *, at_epoch_end: bool) -> bool:
        """Compare at a boundary; return True to be called at the next one, too."""
        if not self._schedulers:
            return False
        counts = [_count_of(one) for one in self._schedulers]
        if self._end is None:
            self._end = compiled_steps.follow_steps(self._on_step)
        for number, (before, now) in enumerate(zip(self._before, counts)):
            if number in self._first and before is not None:
                late = before != self._first[number] and self._last[number] == now and not at_epoch_end
                self._times[number] = self._times[number] + 1 if late else -SCHEDULE_LOOKS
                if self._times[number] == SCHEDULE_STEPS:
                    name = type(self._schedulers[number]).__name__
                    self.late = f"its {name} steps after boundary(), and a checkpoint would lack that step: {LAST}"
        self._before, self._looks = counts, self._looks + 1
        self._first.clear()
        if self.late or self._looks > SCHEDULE_LOOKS or all(self._times[n] < 0 for n in range(len(counts))):
            self.close()
            return False
        return True

    def close(self) -> None:
        """Learn no more."""
        self._schedulers = []
        if self._end is not None:
            self._end()
            self._end = None

    def _on_step(self, optimizer: Any) -> None:
        for number, one in enumerate(self._schedulers):
            if one.optimizer is optimizer:
                self._last[number] = _count_of(one)
                self._first.setdefault(number, self._last[number])


def _count_of(scheduler: Any) -> Any:
    """Return a number that grows with a scheduler's steps; a chained one has those of the others."""
    inside = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", None), [getattr(one, "last_epoch", None) for one in inside]


def _reached(held: Iterable[object]) -> set[int]:
    """Return the ids of all that the things held save: a module saves no optimizer that it refers to, for example."""
    found: set[int] = set()
    for thing in held:
        kinds: tuple[type, ...] = (optim.Optimizer, torch.Tensor, *SCHEDULERS)
        for kind, saves in ((nn.Module, torch.Tensor), (optim.Optimizer, optim.Optimizer), (SCHEDULERS, SCHEDULERS)):
            if isinstance(thing, kind):
                kinds = saves if isinstance(saves, tuple) else (saves,)
        found.add(id(thing))
        found.update(id(one) for kind in kinds for one in objects_in(thing, kind))
    return found
