"""Name a configuration so that a person can say it, "128×256×64 · 8 warps · 4 stages · persistent", and read it back.

A class of configurations has a dict of phrases, in the order of speech. A key names one field or several, and each
field has its place {} in the phrase:

    PHRASES = {"block_m block_n": "{}×{}", "num_warps": "{} warps", "kernel": "{}", "pdl": "early"}
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

SEPARATOR = " · "


def count(number: int, things: str) -> str:
    """Return "1 stage", "4 stages" or "2 programs per SM": the first word of `things` is a plural."""
    first, space, rest = things.partition(" ")
    return f"{number} {first[:-1] if number == 1 and first.endswith('s') else first}{space}{rest}"


def say(config: Any, phrases: Mapping[str, str], always: Collection[str] = ()) -> str:
    """Return the spoken name of a dataclass; fields that have their defaults are left out, except those in `always`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    parts = []
    for names, phrase in phrases.items():
        values = [getattr(config, name) for name in names.split()]
        if names not in always and values == [defaults[name] for name in names.split()]:
            continue
        if phrase.startswith("{} "):
            parts.append(count(values[0], phrase[3:]))
        else:
            parts.append(phrase.format(*values))
    return SEPARATOR.join(parts)


def read(text: str, phrases: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that a spoken name gives, for the class to be called with; ValueError for other text.

    A number becomes an int, a word a str, and the field of a phrase without a place True. Commas, which are easier to
    type, may separate the parts as well.
    """
    fields: dict[str, Any] = {}
    for part in re.split("[·,]", text):
        for names, phrase in phrases.items():
            if names.split()[0] not in fields and (found := re.fullmatch(_pattern(phrase), part.strip())):
                fields |= {
                    name: _convert(value, phrase)
                    for name, value in zip(names.split(), found.groups() or [""])
                }
                break
        else:
            raise ValueError(f"unknown part {part.strip()[:60]!r} of a configuration's name {text[:60]!r}.")
    return fields


def _convert(value: str, phrase: str) -> int | str | bool:
    return (int(value) if value.isdigit() else value) if "{}" in phrase else True


def _pattern(phrase: str) -> str:
    """Return the regular expression of a phrase, in which the first word after the number may be a singular."""
    place = r"([0-9]{1,9}B?|[a-z_][a-z0-9_]*)"
    pattern = re.escape(phrase).replace(r"\{\}", place).replace("×", "[×x]")
    return re.sub(r"^(\([^)]*\)\\ [a-z]+)s", r"\1s?", pattern)
