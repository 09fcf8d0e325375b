"""The console of all views: names, notes and reasons from outside are text and nothing else.

Markup is off, so that ``[/]`` and ``[link=...]`` are four and eight characters. Control characters and marks that turn
the writing direction are replaced in what is printed, whatever it was made of; only the console's own styles remain.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from cadenza.policies.core.text import printable


class Terminal(Console):
    """A rich console that prints text from outside as it is, except for what a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text that is measured as it will be printed."""
        return super().render_str(clean(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable without foreign control characters."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(clean(segment.text), segment.style)


def show(out: Console, screens: Iterable[RenderableType], *, live: bool) -> None:
    """Print each screen, or on a terminal show one after the other until the user stops it."""
    if not live or not out.is_terminal:
        for screen in screens:
            out.print(screen)
        return
    try:
        with Live(console=out, screen=True, auto_refresh=False) as display:
            for screen in screens:
                display.update(screen, refresh=True)
    except KeyboardInterrupt:
        return


def clean(text: str) -> str:
    """Return a text whose lines hold printable characters only."""
    if text.isprintable():
        return text
    return "\n".join(printable(line, len(line)) for line in text.split("\n"))
