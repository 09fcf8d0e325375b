"""What keeps a page from being drawn."""

from __future__ import annotations


class ReportError(Exception):
    """Base of this package's errors."""


class EnvironmentLacks(ReportError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """Something that the page needs is not installed; the message names it."""
