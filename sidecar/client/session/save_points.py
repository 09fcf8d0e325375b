"""Save points: the boundaries at which a requested checkpoint has all that the training has done so far.

The order waits while the training passes other boundaries. Those of an evaluation have half a result; at those between
two backward passes gradients are pending, which no checkpoint holds; at the last batch of an epoch the epoch's own work
is still to come. A job may yield at any of them, because then its process goes on.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.session.savers import Place

if TYPE_CHECKING:
    import torch

    from cadenza.sidecar.client.session.checkpoint_request import Saver
    from cadenza.sidecar.client.session.savers import Registration, Savers

FIRST_LOOK, LAST_LOOK, REST = 2, 3, 64
"""Looks at boundaries in a row that tell whether each follows an optimizer's step, and calls until they are repeated:
those of a sample of memory."""
STEPLESS_BOUNDARIES = 32
"""Training boundaries without a step of a torch optimizer after which the script is one that has none."""
DEPTH = 6
"""Levels of containers in which optimizers are looked for."""


class SavePoints:
    """Decides at each boundary, while a checkpoint is requested, whether it can be taken there."""

    def __init__(self, savers: Savers, sources: Callable[[], Iterable[object]]) -> None:
        self._savers = savers
        self._sources = sources
        self.on_sample: list[Callable[[list[Any], list[object]], object]] = []
        """Functions of savers that say what they hold; called with the optimizers that have stepped in a sample, and
        with all that is held, if all savers are of this kind."""
        self._gradients = Gradients()
        self._sampled = Gradients()
        self._each_steps = False
        """Each boundary follows an optimizer's step, as far as was seen."""
        self._looks = 0
        self._own: dict[Registration, Saver] = {}
        self._own_at, self._own_every = 0, 0
        """Training steps at the saves that ``_own`` has, and since those before them."""
        self._end_passed = False
        """This look-out has passed the end of an epoch."""
        self._evaluated_at, self._evaluated_before = 0, 0
        """Training steps after which the last two evaluations began."""
        self._evaluated_sum = -1

    # --- the script's own saves ----------------------------------------------------------------------------

    def saved(self, registration: Registration, saved: Saver, trained: int) -> int:
        """Note a save that the script made by itself after ``trained`` steps; return the steps since the one before."""
        if trained != self._own_at:
            self._own.clear()
            self._own_every, self._own_at = trained - self._own_at, trained
        self._own[registration] = saved
        return self._own_every

    def own(self, trained: int) -> Mapping[Registration, Saver]:
        """Return the saves that the script itself has made since the last training step."""
        return self._own if trained == self._own_at else {}

    # --- evaluations ---------------------------------------------------------------------------------------

    def evaluated(self, summed_ns: int, trained: Callable[[], int]) -> None:
        """Note a boundary of an evaluation; ``summed_ns`` grows with each training step."""
        if summed_ns != self._evaluated_sum:
            self._evaluated_sum = summed_ns
            self._evaluated_before, self._evaluated_at = self._evaluated_at, trained()

    def _evaluates_next(self, trained: int) -> bool:
        """Return whether an evaluation follows this step, if they come after equal numbers of steps."""
        return 0 < self._evaluated_at == trained - self._evaluated_at + self._evaluated_before

    # --- the decision --------------------------------------------------------------------------------------

    def passes(self, trained: int, order: int, pending: Callable[[], bool], place: Callable[..., Place]) -> int:
        """Return why the checkpoint of an order cannot be taken at this boundary, as ``PASSED_…``.

        0 if it can, and BEFORE_NEXT_BATCH if it can once the rest of the step is done. ``pending()`` says that it is
        still requested; ``place`` makes the boundary's Place of what is known here. Every rank comes to the same result
        at the same boundary; if one does not, the agent finds a later one.
        """
        self._gradients.follow(pending, order)
        answer = self._savers.may(
            place(
                evaluates_next=self._evaluates_next(trained),
                end_passed=self._end_passed,
                stays=False,
                gradients=functools.cache(lambda: self._gradients.pending(self._things())),
            )
        )
        self._end_passed |= answer == wire.PASSED_EPOCH_END
        if answer <= 0:
            self._tell_left_out(self._gradients.stepping)
        return answer

    def stands(self, trained: int, place: Callable[..., Place]) -> int:
        """Return why a job that yields here cannot save while it is away, as ``PASSED_…``; 0 if it can."""

        def gradients() -> int:
            return 0 if self._each_steps or Gradients.none(self._things()) else wire.PASSED_GRADIENTS

        evaluates_next = self._evaluates_next(trained)
        return self._savers.may(
            place(evaluates_next=evaluates_next, end_passed=False, stays=True, gradients=functools.cache(gradients))
        )

    def sample(self) -> bool:
        """Learn whether each boundary follows an optimizer's step; return True to be called at the next one too.

        With several backward passes to a step, one of two boundaries in a row does not.
        """
        self._looks += 1
        if self._looks < 1:
            return False
        if self._looks == 1:
            self._sampled.follow(lambda: True)
            return True
        used = self._sampled.has_stepped and not self._sampled.pending(self._things())
        self._each_steps = used and (self._each_steps or self._looks == FIRST_LOOK)
        if self._looks < LAST_LOOK:
            return True
        self._tell_left_out(self._sampled.stepping)
        self._sampled.forget()
        self._looks = -REST
        return False

    def _tell_left_out(self, stepping: list[Any]) -> None:
        """Have the savers say what of the optimizers that step they do not hold."""
        if stepping and len(self.on_sample) == len([*self._savers]):
            self.on_sample[0](stepping, list(_things(one.holds for one in self._savers)))

    def over(self) -> None:
        """End the look-out for a save point: the order is carried out or withdrawn."""
        self._end_passed = False
        self._gradients.forget()

    def close(self) -> None:
        """Leave torch's hooks."""
        self.over()
        self._sampled.forget()

    def _things(self) -> list[object]:
        """Return all that the script and its keepers have named."""
        return [*self._sources(), *(one.holds for one in self._savers)]


class Gradients:
    """Knows, from the steps of all torch optimizers while a checkpoint is requested, whether gradients are pending.

    A gradient is used up if it is zero, or unchanged since its own optimizer stepped. It is also if its optimizer has
    stepped since the last boundary, and it has not changed since the last step of any: the backward pass of a GAN's
    generator leaves some in the discriminator.
    """

    def __init__(self) -> None:
        self._end: Callable[[], None] | None = None
        self._pending: Callable[[], bool] = bool
        self._seen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        """The optimizers that have stepped; no state lives longer because of it."""
        self._after_own: dict[int, Stamp] = {}
        self._after_any: dict[int, Stamp] = {}
        """Gradients as they were at the last step of their optimizer, and since the last boundary of any, by
        parameter."""
        self._stepped: set[int] = set()
        """Parameters whose optimizer has stepped since the last boundary."""
        self._stepless = 0
        """Boundaries at which no optimizer had stepped since the one before."""
        self._others: bool | None = None
        """This process has a torch optimizer at all; None: it was not looked for."""
        self._order = 0
        """Order for which it was looked for: where the agent moves its stop step on while that takes its time, the
        next boundary must not look again."""

    @property
    def has_stepped(self) -> bool:
        """True if an optimizer has stepped since the last boundary."""
        return bool(self._stepped)

    @property
    def stepping(self) -> list[Any]:
        """The optimizers that have stepped since they are followed."""
        return list(self._seen.values())

    def follow(self, pending: Callable[[], bool], order: int = 0) -> None:
        """Record the steps of optimizers from here on; a second call adds nothing."""
        if self._end is None and (not order or order != self._order):
            self._others, self._order = None, order
        self._pending = pending
        if self._end is None and "torch" in sys.modules:
            from cadenza.sidecar.client.session import compiled_steps  # noqa: PLC0415

            self._end = compiled_steps.follow_steps(self._on_step)

    def forget(self) -> None:
        """Stop recording."""
        if self._end is not None:
            self._end()
        others, order = self._others, self._order
        self.__init__()  # type: ignore[misc]
        self._others, self._order = others, order

    @staticmethod
    def none(things: Iterable[object]) -> bool:
        """Return whether there are no gradients, or only zeros, as far as is known without looking at a step."""
        if "torch" not in sys.modules:
            return True
        parameters = list(Gradients()._parameters(things))  # noqa: SLF001
        return all(one.grad is None or _is_zero(one.grad) for one in parameters) and (
            bool(parameters) or not _any_optimizer()
        )

    def pending(self, things: Iterable[object]) -> int:
        """Return ``PASSED_GRADIENTS`` or ``PASSED_UNKNOWN_GRADIENTS`` if some may be pending at this boundary, else 0.

        The interval since the boundary before ends here.
        """
        if self._end is None:  # no torch, so no gradients
            return 0
        parameters, stepped = self._parameters(things), bool(self._stepped)
        used = all(self._is_used(one) for one in parameters)
        self._stepped.clear()
        self._after_any.clear()
        if stepped:
            return 0 if used else wire.PASSED_GRADIENTS
        if self._others is None:
            self._others = _any_optimizer()
        self._stepless += 1
        if self._seen or (self._others and self._stepless <= STEPLESS_BOUNDARIES):
            return wire.PASSED_GRADIENTS
        known = bool(parameters) or not self._others
        return 0 if used and known else wire.PASSED_UNKNOWN_GRADIENTS

    def _parameters(self, things: Iterable[object]) -> list[torch.Tensor]:
        """Return the parameters of all known optimizers, or of the known modules where there is no optimizer."""
        optimizers, modules = dict(self._seen), dict[int, Any]()
        for thing in _inside(things):
            (optimizers if hasattr(thing, "param_groups") else modules)[id(thing)] = thing
        if optimizers:
            return [one for optimizer in optimizers.values() for one in _parameters(optimizer)]
        return [one for module in modules.values() for one in module.parameters()]

    def _is_used(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter's gradient holds nothing that an optimizer has still to see."""
        gradient, key = parameter.grad, id(parameter)
        if gradient is None or (key in self._after_own and self._after_own[key].same(gradient)):
            return True
        if key in self._stepped and key in self._after_any and self._after_any[key].same(gradient):
            return True
        return _is_zero(gradient)

    def _on_step(self, optimizer: Any) -> None:
        """Record the gradients after an optimizer's step."""
        if not self._pending():
            self.forget()
            return
        self._seen[id(optimizer)] = optimizer
        for one in list(self._seen.values()):
            for parameter in _parameters(one):
                key, gradient = id(parameter), parameter.grad
                stamp = None if gradient is None else Stamp(gradient)
                if one is optimizer:
                    self._stepped.add(key)
                for stamps in (self._after_any, self._after_own) if one is optimizer else (self._after_any,):
                    stamps.pop(key, None)
                    if stamp is not None:
                        stamps[key] = stamp


class Stamp:
    """A gradient at one moment: the tensor, and how often it had been changed in place."""

    def __init__(self, gradient: torch.Tensor) -> None:
        from torch.utils.weak import TensorWeakRef  # noqa: PLC0415

        # A plain weakref does not find a tensor that only C++ holds, such as a gradient (torch.utils.weak).
        self._tensor = TensorWeakRef(gradient)
        self._version = gradient._version  # noqa: SLF001 - autograd's own count

    def same(self, gradient: torch.Tensor) -> bool:
        """Return whether it is this gradient, unchanged."""
        return self._tensor() is gradient and gradient._version == self._version  # noqa: SLF001


def _is_zero(gradient: Any) -> bool:
    """Return whether all of a gradient on this rank is 0; what cannot be read is not."""
    try:
        # any() of a whole DTensor is a collective of its ranks, and the others may not come to it.
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return not bool((local.coalesce().values() if local.is_sparse else local).any())
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False


def _parameters(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer's parameters."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _inside(things: Iterable[object]) -> Iterator[Any]:
    """Yield the optimizers and modules among some things, in containers too, and in what functions return."""
    from torch import nn, optim  # noqa: PLC0415 - only a process that has torch comes here

    yield from (one for one in _things(things) if isinstance(one, (nn.Module, optim.Optimizer)))


def _things(things: Iterable[object], depth: int = DEPTH) -> Iterator[Any]:
    """Yield some things, those in containers one by one, and those that functions return."""
    from torch import nn, optim  # noqa: PLC0415

    for thing in things:
        found = thing
        if callable(found) and not isinstance(found, (nn.Module, optim.Optimizer)) and depth == DEPTH:
            found = [found()]  # as in the survey of the state that moves
        if isinstance(found, Mapping):
            found = list(found.values())
        if isinstance(found, (list, tuple, set)):
            yield from _things(found, depth - 1) if depth > 0 else ()
        else:
            yield found


def _any_optimizer() -> bool:
    """Return whether this process has any torch optimizer; looks at all objects, once or twice in an order."""
    from torch import optim  # noqa: PLC0415

    return any(issubclass(type(one), optim.Optimizer) for one in gc.get_objects())
