"""``--set KEY=VALUE``: what few ever set about a command, listed by its help below the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import click

GIVEN = f"{__name__}.given"
"""Name in the context's ``meta`` of the pairs as they were given."""


class Key(NamedTuple):
    """One key: the form of its value, its meaning, its type and its default."""

    name: str
    form: str
    line: str
    kind: click.ParamType = click.STRING  # type: ignore[type-arg,unused-ignore]  # older click has no parameter there
    default: Any = None

    @property
    def variable(self) -> str:
        """Return the name of the command's argument."""
        return self.name.replace("-", "_")


class KeyedCommand(click.Command):
    """A command whose function takes ``keys`` as it takes options; ``keys`` has them by heading."""

    def __init__(self, *words: Any, keys: Mapping[str, Sequence[Key]], **options: Any) -> None:
        super().__init__(*words, **options)
        self.headings = keys
        self.keys = {key.name: key for rows in keys.values() for key in rows}
        self.params.append(
            click.Option(
                ("--set", "pairs"), multiple=True, metavar="KEY=VALUE", help="Set a key of those below.",
                shell_complete=lambda _ctx, _option, begun: [f"{key}=" for key in self.keys if key.startswith(begun)],
            )
        )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add the keys' values to the command's arguments."""
        rest = super().parse_args(ctx, args)
        ctx.meta[GIVEN] = given = ctx.params.pop("pairs", ())
        ctx.params |= {key.variable: key.default for key in self.keys.values()}
        for pair in given:
            name, _, value = pair.partition("=")
            if name not in self.keys:
                near = get_close_matches(name, self.keys, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(self.keys)}"
                raise click.BadParameter(f"no key {name!r}; {hint}", ctx, param_hint="--set")
            if not value:
                raise click.BadParameter(f"{name} has no value: give {name}={self.keys[name].form}", param_hint="--set")
            try:
                ctx.params[self.keys[name].variable] = self.keys[name].kind.convert(value, None, ctx)
            except click.BadParameter as error:
                raise click.BadParameter(error.message, ctx, param_hint=f"--set {name}") from None
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, then the keys by heading."""
        super().format_options(ctx, formatter)
        self.format_keys(formatter)

    def format_keys(self, formatter: click.HelpFormatter) -> None:
        """Write the keys by heading."""
        for heading, rows in self.headings.items():
            with formatter.section(heading):
                formatter.write_dl([row_of(key) for key in rows])


def row_of(key: Key) -> tuple[str, str]:
    """Return a key and its meaning as the help shows them."""
    usual = "" if key.default is None else f"  [default: {key.default:g}]"
    return f"{key.name}={key.form}", key.line + usual
