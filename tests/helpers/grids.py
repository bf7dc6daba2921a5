"""Parametrizations smaller than a product."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest


def in_turn(**choices: Iterable[Any]) -> Any:
    """A parametrization over every value of every argument, in as few cases as the longest list is long: the shorter ones
    begin anew. Mappings give ids and the values beside them."""
    named = {
        argument: list(values.items())
        if isinstance(values, Mapping)
        else [(getattr(value, "__name__", str(value)), value) for value in values]
        for argument, values in choices.items()
    }
    num = max(map(len, named.values()))
    rows = [[values[case % len(values)] for values in named.values()] for case in range(num)]
    ids = [", ".join(name for name, _ in row) for row in rows]
    return pytest.mark.parametrize(",".join(named), [[value for _, value in row] for row in rows], ids=ids)


def every(names: str | tuple[str, ...], rows: Iterable[Any]) -> Any:
    """Like `pytest.mark.parametrize`, but one test: rows that differ in what is said and refused, and need nothing fresh.
    The row that fails is noted at the error."""
    arguments = names if isinstance(names, tuple) else (names,)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **fixtures: Any) -> None:
            for row in rows:
                given = dict(zip(arguments, row if len(arguments) > 1 else (row,), strict=True))
                try:
                    test(*args, **fixtures, **given)
                except Exception as error:
                    error.add_note(f"with {given}")
                    raise

        signature = inspect.signature(test)
        kept = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        run.pytestmark = list(getattr(test, "pytestmark", ()))  # type: ignore[attr-defined]
        return run

    return decorate
