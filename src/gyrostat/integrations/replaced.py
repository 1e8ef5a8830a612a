"""Attributes of a framework's object that are others for a while: where its loop is to find gyrostat's part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(thing: Any, **attributes: Any) -> Iterator[None]:
    """Inside, `thing` has these attributes. An attribute of its class is hidden, and there again afterwards."""
    before = {name: vars(thing).get(name, _MISSING) for name in attributes}
    for name, value in attributes.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:
                delattr(thing, name)
            else:
                setattr(thing, name, value)
