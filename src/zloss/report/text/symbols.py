"""The paper's symbols (P_Z^99.9, δ_u, λ_diag) set as mathematics: in HTML, in SVG, by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

_ACCENTS = {"w̄": r"$\bar{w}$", "Z̃": r"$\tilde{Z}$"}
# One letter, then _sub and ^sup as the paper writes them: P_Z^99.9, δ_u, s_rel, λ_diag, Z̃.
_SYMBOL = re.compile(r"(?<![\w.])([A-Za-zΑ-Ωα-ω])(?:_([A-Za-z]+|\d+)(?![\w]))?(?:\^([\d.]*\d))?")


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
    # The last span returns to the baseline; its zero-width space is there because an empty span moves nothing.
    return out + f'<tspan dy="{-shift:g}">&#8203;</tspan>'


def _mathtext_symbol(match: re.Match[str]) -> str:
    if match[2] is None and match[3] is None:
        return match[0]
    sub = rf"_{{\mathrm{{{match[2]}}}}}" if match[2] else ""
    sup = rf"^{{{match[3]}}}" if match[3] else ""
    return f"${match[1]}{sub}{sup}$"
