"""Builds HTML so that nothing gets in unescaped: text is escaped, markup has a type of its own (pure)."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "br", "hr", "input", "link"})


class Html(str):
    """Markup that may stand in a page as it is."""

    __slots__ = ()


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return an element; plain strings are escaped, None is left out, ``class_`` and ``data_x`` name attributes.

    >>> tag("p", "a < b", tag("b", "c"), class_="x", data_value=1.5, hidden=None)
    '<p class="x" data-value="1.5">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: str | None) -> Html:
    """Return children one after the other, text escaped."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))
