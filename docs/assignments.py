"""Values that a module's source assigns to names, for the tables that pages take from the code."""

from __future__ import annotations

import ast


def assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the last value of each name."""
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
