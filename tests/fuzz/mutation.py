"""Damage to JSON and to files, drawn from a seeded generator: the same seed gives the same damage."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from random import Random
from typing import Any

HOSTILE_TEXT = "\x1b[31m[/x]\u2028\u0085\x00</script>" + "\ud800"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**6, 2**63, 10**400, 0.5, -0.0, 1e-320, 1e38, -1e38, 1e200, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
    *("", "x", "nan", "1e9", "é" * 300, HOSTILE_TEXT),
    *([], {}, [[]], [None], [0.0], {"": None}, {"a": {"b": [1, "2"]}}),
)
"""What a key is replaced by: numbers at the ends of their range, text for numbers, containers for scalars."""


def damaged_json(data: Any, random: Random, *, largest: float = math.inf) -> str:
    """The text of `data` after one to three changes of its values or keys; no new number is beyond `largest`."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        data = _changed(data, random)
    return json.dumps(_bounded(data, largest))


def damaged_bytes(content: bytes, random: Random) -> bytes:
    """`content` cut, overwritten, repeated, in another encoding, or replaced."""
    kind, at = random.randrange(9), random.randrange(len(content) + 1)
    if kind <= 2:
        return content[:at]
    if kind == 3:
        return content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
    if kind == 4:
        return content[:at] + random.randbytes(random.randrange(1, 40)) + content[at:]
    if kind == 5:
        return content[:at] + content[random.randrange(len(content) + 1) :]
    if kind == 6:
        return random.choice((b"", b"\x00" * len(content), b"null", b"[]", b"{}", b'""', b"[" * 100_000, b"\xff\xfe"))
    if kind == 7:
        return b"\xef\xbb\xbf" + content
    return content.decode("utf-8", errors="replace").encode("utf-16")


def _changed(data: Any, random: Random) -> Any:
    places = list(_places(data))
    if not places:
        return random.choice(VALUES)
    holder, key = random.choice(places)
    kind = random.randrange(10)
    if kind <= 3:
        holder[key] = _other_value(holder[key], random)
    elif kind == 4:
        del holder[key]
    elif kind == 5 and isinstance(holder, dict):
        holder[random.choice((key + "_", "extra", "", "schema"))] = holder.pop(key)
    elif kind == 6:
        other, name = random.choice(places)
        holder[key], other[name] = other[name], copy.deepcopy(holder[key])
    elif kind == 7 and isinstance(holder, list):
        random.choice((holder.reverse, holder.clear, lambda: holder.insert(key, copy.deepcopy(holder[key]))))()
    elif isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        factor = random.choice((-1, 0, 1e3, 1e-9, 1e30, -1e18))
        holder[key] = holder[key] * factor if abs(holder[key]) < 1e200 else 0
    else:
        holder[key] = copy.deepcopy(random.choice(VALUES))
    return data


def _bounded(data: Any, largest: float) -> Any:
    if isinstance(data, dict):
        return {key: _bounded(value, largest) for key, value in data.items()}
    if isinstance(data, list):
        return [_bounded(value, largest) for value in data]
    return 7 if isinstance(data, (int, float)) and abs(data) > largest else data


def _other_value(value: Any, random: Random) -> Any:
    """Any hostile value; in most cases one of the same type, which a check of types lets through."""
    same = [other for other in VALUES if _type(other) == _type(value)]
    return copy.deepcopy(random.choice(same if same and random.random() < 0.7 else VALUES))


def _type(value: Any) -> type:
    return float if isinstance(value, int) and not isinstance(value, bool) else type(value)


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value; of a long list of plain numbers its ends only, so that other keys are met as well."""
    if isinstance(data, dict):
        for key in data:
            yield data, key
            yield from _places(data[key])
    elif isinstance(data, list):
        plain = len(data) > 6 and not isinstance(data[0], (dict, list))
        for index in (0, len(data) - 1) if plain else range(len(data)):
            yield data, index
            yield from _places(data[index])
