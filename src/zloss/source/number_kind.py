"""What counts as a number in an argument. No torch here."""

from __future__ import annotations

import sys

_LARGEST = int(sys.float_info.max)


def is_number(value: object) -> bool:
    """An int or a float: not a bool, not a string such as "1e-4" from a config file, not an int beyond the range of floats."""
    if isinstance(value, bool):
        return False
    return isinstance(value, float) or (isinstance(value, int) and -_LARGEST <= value <= _LARGEST)
