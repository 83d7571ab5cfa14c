"""JSON as jsonb holds it, and lengths of time."""

import json
import math
from datetime import timedelta
from decimal import Decimal
from typing import Any, Union

Duration = Union[float, timedelta]  # seconds


def check(value: Any, path: str = "$") -> None:
    """Raises a TypeError, which names the place, if jsonb cannot hold the value, or would return another one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{path} is {value}, which JSON cannot hold")
    if isinstance(value, str):
        if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
            raise TypeError(f"{path} has a character that jsonb cannot hold: NUL, or half a surrogate pair")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{path} has the key {key!r}, which is no string")
            check(key, f"{path:.200}, key {key!r},")
            check(item, f"{path:.200}.{key}")  # cut: each item has a path, and a key can have megabytes
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check(item, f"{path:.200}[{index}]")
    elif not isinstance(value, (int, float, type(None))):
        raise TypeError(f"{path} is a {type(value).__name__}, which JSON cannot hold: convert it, to a string for example")


def dumps(value: Any) -> str:
    try:
        check(value)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise TypeError("the value contains itself, or is nested too deeply") from None


def _float(text: str) -> float:  # jsonb writes 1e16 out, as an integer, and has no negative zero
    number = float(text)
    return int(Decimal(text)) if abs(number) >= 1e16 else number + 0.0


def loads(text: str | None) -> Any:
    """What a later replay returns for this text; None for SQL's NULL."""
    return None if text is None else json.loads(text, parse_float=_float)


def quoted(text: str, mark: str = '"') -> str:
    return mark + text.replace(mark, mark + mark) + mark


def seconds(length: Duration) -> float:
    return length.total_seconds() if isinstance(length, timedelta) else float(length)
