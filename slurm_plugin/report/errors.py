"""Errors of the report."""

from __future__ import annotations


class ReportError(Exception):
    """Base of this package's errors."""


class EnvironmentLacks(ReportError):  # noqa: N818 (named for what is wrong, as elsewhere)
    """Missing package that the page needs; the message names it."""
