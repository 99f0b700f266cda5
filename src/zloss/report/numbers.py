"""Numbers as people read them: on the terminal, on the page, in figures."""

from __future__ import annotations

import math

MISSING = "–"
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def number(value: float | int | None, digits: int = 4) -> str:
    """Four significant digits; powers of ten only where plain digits would be unreadable.

    >>> number(30.6912), number(0.76401), number(0.1), number(6.2e-7), number(49152), number(None)
    ('30.69', '0.7640', '0.1', '6.2×10⁻⁷', '49,152', '–')
    """
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e12):
        return f"{int(value):,}"
    if not 1e-3 <= abs(value) < 1e6:
        return "×".join(_scientific(value, digits))
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    # Trailing zeros show the precision of a rounded number; a number that is exact in fewer digits has none.
    return text.rstrip("0").rstrip(".") if "." in text and float(text.replace(",", "")) == value else text


def _scientific(value: float, digits: int) -> tuple[str, str]:
    """Mantissa and power of ten."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return mantissa, f"10{str(int(exponent)).translate(_SUPERSCRIPT)}"


def percent(value: float) -> str:
    """A share in percent, with two significant digits however small it is.

    >>> percent(0.0136), percent(3.4e-5), percent(1.234), percent(0.0), percent(1e307)
    ('1.4 %', '0.0034 %', '123 %', '0 %', 'inf %')
    """
    share = 100 * value  # may overflow where `value` does not
    if share == 0 or abs(share) >= 1e6 or math.isnan(share):
        return f"{share:.2g} %"
    places = max(1 - math.floor(math.log10(abs(share))), 0)
    return f"{share:,.{places}f} %"


def factor(value: float | None) -> str:
    """A ratio as a multiplier: "×0.63".

    >>> factor(0.6252), factor(12.8), factor(1e-9)
    ('×0.625', '×12.8', '≈ 0')
    """
    if value is None:
        return MISSING
    if abs(value) < 1e-4:
        return "≈ 0"
    return f"×{value:.0f}" if abs(value) >= 1000 else f"×{value:.3g}"


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.42), seconds(75), seconds(119.7)
    ('0.42 s', '1 min 15 s', '2 min 0 s')
    """
    if value is None:
        return MISSING
    if value < 10:
        return f"{value:.2g} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def pair(raw: float | None, centered: float | None) -> str:
    """A number in both coordinates, as far as it exists.

    >>> pair(17.51, 5.413), pair(0.5, None)
    ('17.51 raw, 5.413 centered', '0.5 raw')
    """
    named = (("raw", raw), ("centered", centered))
    return ", ".join(f"{number(value)} {name}" for name, value in named if value is not None)


def both(lead: str, raw: float | None, centered: float | None) -> str:
    """The pair as a sentence with a lead; nothing if neither number exists."""
    text = pair(raw, centered)
    return f"{lead}{text}." if text else ""
