"""State diagrams as SVG: states in a column, forward transitions on the right, returns on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

BOX_W, GAP, TOP, MARGIN = 150, 70, 50, 20
PORT_H, LANE_W, CHAR_W, LINE_H = 18, 14, 6.4, 15
TITLE_CHAR_W = 9.5
STYLE = (
    "<style>text{fill:#223;stroke:#fff;stroke-width:4;paint-order:stroke}.box text{stroke:none}"
    "path{fill:none;stroke:#334}marker path{fill:#334;stroke:none}"
    "rect{fill:#e8ebf8;stroke:#334}svg>rect{fill:#fff;stroke:none}"
    "@media(prefers-color-scheme:dark){text{fill:#dde;stroke:#1e2129}path,rect{stroke:#aab}marker path{fill:#aab}"
    "rect{fill:#333a52}svg>rect{fill:#1e2129}}</style>"
)
"""Colors of the page's own light and dark scheme."""
MARKER = (
    '<defs><marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L10 5L0 10z"/></marker></defs>'
)


class Transition(NamedTuple):
    """One row of a machine's table."""

    start: str
    event: str
    end: str


def draw(rows: Iterable[tuple[str, str, str]], title: str, states: Sequence[str] = ()) -> str:
    """Return the diagram of (state, event, next state) rows; ``states`` gives their order, first row first by default.

    Transitions to the state below share a straight arrow. Every other one leaves and enters at the side, with its
    event above the line where it leaves.
    """
    rows = [Transition(*row) for row in dict.fromkeys(rows) if row[0] != row[2]]
    named = dict.fromkeys(state for row in rows for state in (row.start, row.end))
    order = list(dict.fromkeys([*(state for state in states if state in named), *named]))
    number = {state: index for index, state in enumerate(order)}
    straight = [row for row in rows if number[row.end] == number[row.start] + 1]
    right = Side([row for row in rows if number[row.end] > number[row.start] + 1], number, 1)
    left = Side([row for row in rows if number[row.end] < number[row.start]], number, -1)
    top, height, y = {}, {}, float(TOP)
    for state in order:
        ports = max(len(side.ports(state)) for side in (right, left))
        top[state], height[state] = y, max(40.0, PORT_H * (ports + 1))
        y += height[state] + GAP
    x = left.width + MARGIN
    clear = max((CHAR_W * len(row.event) - BOX_W / 2 for row in straight), default=0.0) + MARGIN
    width, total = x + BOX_W + max(right.width, clear) + MARGIN, y - GAP + MARGIN
    width = max(width, 2 * MARGIN + TITLE_CHAR_W * len(title))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {total:.0f}" width="{width:.0f}"'
        f' height="{total:.0f}" role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="12">'
        f'{STYLE}{MARKER}<rect width="100%" height="100%"/>'
        f'<text x="{MARGIN}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>'
    )
    parts = [head]
    for state in order[:-1]:
        events = [row.event for row in straight if row.start == state]
        if events:
            bottom = top[state] + height[state]
            first = bottom + GAP / 2 - LINE_H * (len(events) - 1) / 2 + 4
            parts.append(_arrow(f"M{x + BOX_W / 2} {bottom}v{GAP}"))
            parts += [_text(x + BOX_W / 2 + 8, first + LINE_H * n, event, "start") for n, event in enumerate(events)]
    parts += right.draw(x + BOX_W, top, height) + left.draw(x, top, height)
    parts += [_box(x, top[state], height[state], state) for state in order]
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass
class Side:
    """The transitions that run along one side, the shortest next to the states."""

    rows: list[Transition]
    number: dict[str, int]
    sign: int
    lanes: dict[Transition, int] = field(init=False)

    def __post_init__(self) -> None:
        by_span = sorted(self.rows, key=lambda row: abs(self.number[row.end] - self.number[row.start]))
        self.lanes = {row: lane for lane, row in enumerate(by_span)}

    @property
    def text_width(self) -> float:
        """Room between the states and the first lane, for the events."""
        return max((CHAR_W * len(row.event) for row in self.rows), default=0.0) + 22

    @property
    def width(self) -> float:
        """Room for events and lanes together."""
        return self.text_width + LANE_W * len(self.rows) if self.rows else 0.0

    def ports(self, state: str) -> list[Transition]:
        """Return the transitions that meet a state here, those that come first at the top."""
        meeting = [row for row in self.rows if state in (row.start, row.end)]
        return sorted(meeting, key=lambda row: (row.start == state, self.lanes[row] * self.sign))

    def draw(self, x: float, top: dict[str, float], height: dict[str, float]) -> list[str]:
        """Return the lines, from the states' edge at ``x`` outward, and their events."""
        parts = []
        for row, lane in self.lanes.items():
            start, end = (
                top[state] + height[state] * (self.ports(state).index(row) + 1) / (len(self.ports(state)) + 1)
                for state in (row.start, row.end)
            )
            far = x + self.sign * (self.text_width + LANE_W * lane)
            parts.append(_arrow(f"M{x:.1f} {start:.1f}H{far:.1f}V{end:.1f}H{x + self.sign:.1f}"))
            anchor = "start" if self.sign > 0 else "end"
            parts.append(_text(x + self.sign * 8, start - 5, row.event, anchor))
        return parts


def _box(x: float, y: float, height: float, state: str) -> str:
    """Return a state's box."""
    middle = f'x="{x + BOX_W / 2}" y="{y + height / 2 + 5}" text-anchor="middle" font-size="14"'
    frame = f'<rect x="{x}" y="{y}" width="{BOX_W}" height="{height}" rx="8"/>'
    return f'<g class="box">{frame}<text {middle}>{escape(state)}</text></g>'


def _arrow(path: str) -> str:
    """Return an arrow along a path."""
    return f'<path d="{path}" marker-end="url(#a)"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    """Return a line of text, which the style gives a ground of its own, so that lines do not cross it."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
