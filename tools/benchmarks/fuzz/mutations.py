"""Seeded mutations: JSON by its structure, text by fragments of its language, anything by its bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

_DEEP = 2_000
#: Values that readers like to trip over.
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**32 - 1, 2**63, 10**300, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "x", "..", "../x", "/etc/hostname", "a/b", "\x00", "\x1b[31m", "[/b]", "\u2028", "\ud800", "x" * 70_000,
    [], {}, [[]], [None], [1, "x"], {"x": {}}, list(range(3_000)),
)  # fmt: skip
_NUMBERS = ("1" * 5_000, "1e999", "-1e999", "NaN")
_BYTES = (
    b"\x00",
    b"\xff",
    b"\x80",
    b"\x7f",
    b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff",
    b"\xff" * 8,
    b"\x00" * 7 + b"\x80",
)


def mutate(content: bytes, random_: random.Random, fragments: Sequence[str] = ()) -> bytes:
    """`content` with one to four changes.

    Args:
        fragments: of the language that a text is written in.
    """
    for _ in range(random_.choice((1, 1, 1, 2, 4))):
        content = _mutate_once(content, random_, fragments)
    return content


def _mutate_once(content: bytes, random_: random.Random, fragments: Sequence[str]) -> bytes:
    if fragments and random_.random() < 0.7:
        return _insert(content, random_.choice(fragments).encode(), random_)
    if content[:1] in b"{[" and random_.random() < 0.8:
        try:
            return _mutate_json(content, random_)
        except (ValueError, RecursionError):  # a mutation before made it no JSON
            pass
    return _mutate_bytes(content, random_)


def _mutate_json(content: bytes, random_: random.Random) -> bytes:
    data = json.loads(content)
    holder: Any = {"": data}
    key: Any = ""
    # A walk from the root, so that the long lists of a tokenizer do not hide everything else.
    while isinstance(holder[key], (dict, list)) and holder[key] and random_.random() < 0.8:
        holder = holder[key]
        key = random_.choice(list(holder)) if isinstance(holder, dict) else random_.randrange(len(holder))
    root = holder if key == "" and holder.get("") is data else None
    action = random_.randrange(6)
    if action == 0 and root is None:
        del holder[key]
    elif action == 1 and isinstance(holder, dict) and root is None:
        holder[f"{key}{random_.choice(('x', '/..', ' '))}"] = holder.pop(key)
    elif action == 2:
        value = holder[key]
        holder[key] = [value] if random_.random() < 0.5 else {"x": value}
    elif action == 3 and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * random_.choice((-1, 2, 3, 1000)) + random_.choice((0, 1, -1))
    else:
        holder[key] = random_.choice(_VALUES)
    text = json.dumps(root[""] if root is not None else data)
    raw = random_.random()
    if raw < 0.03:
        text = text.replace("1", random_.choice(_NUMBERS), 1)
    elif raw < 0.06:
        text = text.replace("null", "[" * _DEEP + "]" * _DEEP, 1)
    return text.encode("utf-8", "surrogatepass")


def _mutate_bytes(content: bytes, random_: random.Random) -> bytes:
    changed = bytearray(content)
    # Headers lie in front and decide most.
    end = len(changed) if random_.random() < 0.3 else min(len(changed), random_.choice((32, 512, 8_192)))
    place = random_.randrange(end) if end else 0
    action = random_.randrange(6)
    if action == 0 and changed:
        changed[place] ^= 1 << random_.randrange(8)
    elif action == 1:
        piece = random_.choice(_BYTES)
        changed[place : place + len(piece)] = piece
    elif action == 2:
        return bytes(changed[:place])
    elif action == 3:
        del changed[place : place + random_.choice((1, 4, 8, 100))]
    elif action == 4:
        size = random_.choice((1, 8, 64))
        changed[place:place] = changed[place : place + size]
    else:
        changed[place : place + 8] = random_.randrange(1 << 64).to_bytes(8, "little")
    return bytes(changed)


def _insert(content: bytes, piece: bytes, random_: random.Random) -> bytes:
    place = random_.randrange(len(content) + 1)
    return content[:place] + piece + content[place + random_.choice((0, 0, 1, 5, 20)) :]
