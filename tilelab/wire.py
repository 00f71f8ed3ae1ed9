"""Dataclasses as JSON and back, for a process that measures: data alone, no code, unlike a pickle."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any


def pack(value: Any) -> Any:
    """What json.dumps takes, of None, a bool, a number, a string, or tuples, lists and dataclasses of such.

    A dataclass is named by module and class: it must be one that an import finds. TypeError says what cannot be sent.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return {type(value).__name__: [pack(each) for each in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: pack(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"class": [type(value).__module__, type(value).__qualname__], "fields": fields}
    raise TypeError(f"a worker is sent numbers, strings, tuples, lists and dataclasses of them; here is a "
                    f"{type(value).__name__}, {value!r:.60}.")


def unpack(data: Any) -> Any:
    """The value that `pack` made data of; the classes' modules are imported."""
    match data:
        case {"class": [module, name], "fields": fields}:
            made = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            if not dataclasses.is_dataclass(made):
                raise TypeError(f"{module}.{name} is no dataclass.")
            return made(**{key: unpack(value) for key, value in fields.items()})
        case {"tuple": values}:
            return tuple(map(unpack, values))
        case {"list": values}:
            return list(map(unpack, values))
    return data
