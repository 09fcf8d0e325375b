"""One decision's effect as a person reads it (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cadenza.slurm_plugin.service.accounting.effects import Effect


def sentence(effect: Effect) -> str:
    """Return what was done, what was measured, and what became of it."""
    change = effect.now if effect.kind == "pack" else f"from {effect.was or 'what it had'} to {effect.now}"
    return f"{effect.kind} {change}: {', '.join(filter(None, (times(effect), gain(effect), fate(effect))))}"


def times(effect: Effect) -> str:
    """Return the iteration times before and after."""
    before, after = (f"{value:.3g} s" if value is not None else "?" for value in (effect.before_s, effect.after_s))
    return "" if effect.before_s is None and effect.after_s is None else f"{before} an iteration before, {after} after"


def gain(effect: Effect) -> str:
    """Return the throughput after over before, as measured and as promised."""
    promised = f"promised {effect.predicted:.2f}x" if effect.predicted is not None else ""
    if effect.gain is None:
        return promised
    of = " of turns" if effect.kind == "pack" else ""
    return f"{effect.gain:.2f}x{of}" + (f" ({promised})" if promised else "")


def fate(effect: Effect) -> str:
    """Return the verdict with its reason."""
    word = effect.verdict or "being measured"
    return f"{word}: {effect.detail}" if effect.detail else word
