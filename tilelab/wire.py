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
        module, name = type(value).__module__, type(value).__qualname__
        try:
            if module == "__main__":  # there it is the worker's own
                raise AttributeError
            functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (AttributeError, ImportError):
            raise TypeError(f"a worker cannot import {name} from {module}: define it at the top of a module.") from None
        fields = {field.name: pack(getattr(value, field.name)) for field in dataclasses.fields(value)
                  if field.init or field.compare}
        return {"class": [module, name], "fields": fields}
    raise TypeError(f"a worker is sent numbers, strings, tuples, lists and dataclasses of them; here is a "
                    f"{type(value).__name__}, {value!r:.60}.")


def unpack(data: Any) -> Any:
    """The value that `pack` made data of; the classes' modules are imported."""
    match data:
        case {"class": [module, name], "fields": fields}:
            made = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            if not dataclasses.is_dataclass(made):
                raise TypeError(f"{module}.{name} is no dataclass.")
            taken = {field.name for field in dataclasses.fields(made) if field.init}
            again = made(**{key: unpack(value) for key, value in fields.items() if key in taken})
            if pack(again) != data:  # what __post_init__ changes, or was changed later, is not made twice
                raise TypeError(f"{name} made anew of its fields is another one, {again!r:.60}: a worker would measure "
                                "what was not asked for.")
            return again
        case {"tuple": values}:
            return tuple(map(unpack, values))
        case {"list": values}:
            return list(map(unpack, values))
    return data
