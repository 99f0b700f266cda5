"""Numbers and symbols as people read them: on the terminal, on the page, in figures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from html import escape

MISSING = "–"
_ACCENTS = {"w̄": r"$\bar{w}$", "Z̃": r"$\tilde{Z}$"}
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
# One letter, then _sub and ^sup as the paper writes them: P_Z^99.9, δ_u, s_rel, λ_diag, Z̃.
_SYMBOL = re.compile(r"(?<![\w.])([A-Za-zΑ-Ωα-ω])(?:_([A-Za-z]+|\d+)(?![\w]))?(?:\^([\d.]*\d))?")


def superscript(exponent: int) -> str:
    """An exponent in raised digits."""
    return str(exponent).translate(_SUPERSCRIPT)


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
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}×10{superscript(int(exponent))}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    # Zeros show precision of a measured number; a number that simply ends earlier does not need them.
    return text.rstrip("0").rstrip(".") if "." in text and float(text.replace(",", "")) == value else text


def coefficient(value: float | None) -> str:
    """A λ: below 0.01 always as a power of ten, so that two of them compare at a glance.

    >>> coefficient(1e-4), coefficient(0.001432), coefficient(0.05)
    ('10⁻⁴', '1.43×10⁻³', '0.05')
    """
    if value is None or not 0 < abs(value) < 1e-2:
        return number(value, 3)
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    power = f"10{superscript(int(exponent))}"
    return power if mantissa == "1" else f"{mantissa}×{power}"


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

    >>> seconds(0.42), seconds(75)
    ('0.42 s', '1 min 15 s')
    """
    if value is None:
        return MISSING
    return (
        f"{value:.2g} s"
        if value < 10
        else f"{value:.0f} s"
        if value < 60
        else f"{int(value // 60)} min {value % 60:.0f} s"
    )


def pair(raw: float | None, centered: float | None) -> str:
    """A number in both coordinates, as far as it exists.

    >>> pair(17.51, 5.413), pair(0.5, None)
    ('17.51 raw, 5.413 centered', '0.5 raw')
    """
    named = (("raw", raw), ("centered", centered))
    return ", ".join(f"{number(value)} {name}" for name, value in named if value is not None)


def both(lead: str, raw: float | None, centered: float | None) -> str:
    """The pair as a sentence with a lead; nothing where neither number exists."""
    text = pair(raw, centered)
    return f"{lead}{text}." if text else ""


def html_text(text: str) -> str:
    """Escaped prose with `code` and symbols set as mathematics.

    >>> html_text("A_p^99 < `zloss audit`")
    '<var>A</var><span class="ss"><sup>99</sup><sub>p</sub></span> &lt; <code>zloss audit</code>'
    """
    parts = text.split("`")
    return "".join(
        f"<code>{escape(part)}</code>" if i % 2 else _symbols(part, _html_symbol) for i, part in enumerate(parts)
    )


def svg_text(text: str) -> str:
    """The same for SVG, where sub- and superscripts are shifted spans."""
    return _symbols(text, _svg_symbol)


def mathtext(text: str) -> str:
    """The same for matplotlib.

    >>> mathtext("λ_diag, w̄")
    '$λ_{\\\\mathrm{diag}}$, $\\\\bar{w}$'
    """
    text = _SYMBOL.sub(_mathtext_symbol, text)
    for accented, command in _ACCENTS.items():
        text = text.replace(accented, command)
    return text


def _symbols(text: str, replace: Callable[[re.Match[str]], str]) -> str:
    out, last = [], 0
    for match in _SYMBOL.finditer(text):
        if match[2] is None and match[3] is None:
            continue
        out += [escape(text[last : match.start()]), replace(match)]
        last = match.end()
    return "".join([*out, escape(text[last:])])


def _html_symbol(match: re.Match[str]) -> str:
    sub, sup = (f"<{tag}>{text}</{tag}>" if text else "" for tag, text in (("sub", match[2]), ("sup", match[3])))
    scripts = f'<span class="ss">{sup}{sub}</span>' if sub and sup else sub + sup
    return f"<var>{match[1]}</var>{scripts}"


def _svg_symbol(match: re.Match[str]) -> str:
    sub, sup = match[2] or "", match[3] or ""
    out, shift = f'<tspan class="var">{match[1]}</tspan>', 0.0
    for text, level in ((sub, 3.0), (sup, -4.5)):
        if text:
            out += f'<tspan class="script" dy="{level - shift:g}">{text}</tspan>'
            shift = level
    # A zero-width space carries the way back to the baseline.
    return out + f'<tspan dy="{-shift:g}">&#8203;</tspan>'


def _mathtext_symbol(match: re.Match[str]) -> str:
    if match[2] is None and match[3] is None:
        return match[0]
    sub = rf"_{{\mathrm{{{match[2]}}}}}" if match[2] else ""
    sup = rf"^{{{match[3]}}}" if match[3] else ""
    return f"${match[1]}{sub}{sup}$"
