"""Colours and line styles: one for each result, the same in every chart, apart for colour-blind eyes and in print."""

from __future__ import annotations

from typing import NamedTuple

LIGHT = ("#59616e", "#1d3fc9", "#f03a00", "#068c57", "#de50a8", "#7b982d", "#0d86f0", "#6b1887")
DARK = ("#a3adbb", "#7caeff", "#e0661a", "#1fe89c", "#c95cc0", "#f7c532", "#baf1d2", "#b657ff")
"""Chosen so that each two stay apart with any of the three kinds of colour blindness, and each from the ground.

The first, a grey, is the baseline's. Beyond the last they start again with other dashes.
"""
DASHES: tuple[tuple[float, ...], ...] = (
    (), (), (6.0, 1.6), (2.0, 1.4), (7.0, 1.6, 1.6, 1.6), (3.6, 1.6), (10.0, 2.0), (1.0, 1.2), (5.0, 1.5, 1.0, 1.5),
)  # fmt: skip
"""In points: on and off. Of another length than the palette, so that colour and dash together repeat late."""

INK, MUTED, GRID, AXIS = "#010203", "#010204", "#010205", "#010206"
"""What a drawing is made with; each is replaced by the page's own colour of that name."""
NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", AXIS: "axis"}


class Look(NamedTuple):
    """How a result's lines look; ``placeholder`` is its colour while it is drawn, ``variable`` on the page."""

    placeholder: str
    variable: str
    dashes: tuple[float, ...]
    width: float


def look(index: int) -> Look:
    """Return the look of the result at a position; 0 is the baseline."""
    at = index % len(LIGHT) if index < len(LIGHT) else 1 + (index - 1) % (len(LIGHT) - 1)
    return Look(f"#0201{at:02x}", f"c{at}", DASHES[index % len(DASHES)], 1.5 if index == 0 else 1.8)


def replacements() -> dict[str, str]:
    """Return the page's colour for each colour of a drawing."""
    series = {f"#0201{at:02x}": f"var(--c{at})" for at in range(len(LIGHT))}
    return {**series, **{colour: f"var(--{name})" for colour, name in NAMES.items()}}


def variables(palette: tuple[str, ...]) -> str:
    """Return the style sheet's variables for a palette."""
    return "".join(f"--c{at}:{colour};" for at, colour in enumerate(palette))
