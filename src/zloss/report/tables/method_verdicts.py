"""The verdicts of a comparison as lines: a word for each method, and its three parts apart."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.results.comparison import Comparison
from zloss.results.quality import QualityVerdict

NO_VERDICT = "no verdict"
TITLES = {"quality": "quality", "coordinate": "diagnosed coordinate", "optimizer": "optimizer"}


@dataclass(frozen=True)
class PartLine:
    """One part of a verdict."""

    name: str
    """ "quality", "coordinate" or "optimizer"."""
    state: str
    reason: str


@dataclass(frozen=True)
class VerdictLine:
    """One method."""

    label: str
    word: str
    """ "accepted", "rejected", "inconclusive" or "no verdict"."""
    parts: tuple[PartLine, ...]
    note: str
    """Why there is no verdict, or the reason of a file without parts."""

    def part(self, name: str) -> PartLine | None:
        """The part of this name, where it applies."""
        return next((part for part in self.parts if part.name == name), None)


def verdict_line(verdict: QualityVerdict) -> VerdictLine:
    """The line of one method."""
    stated = {True: "accepted", False: "rejected", None: NO_VERDICT}[verdict.accepted]
    parts = () if verdict.parts is None else verdict.parts.named()
    return VerdictLine(
        label=verdict.label,
        word=verdict.verdict or stated,
        parts=tuple(PartLine(name, part.state, part.reason) for name, part in parts),
        note="" if verdict.verdict is not None and parts else verdict.reason,
    )


def answer(comparison: Comparison) -> str:
    """The verdicts in one sentence, accepted methods first; empty where nothing was judged."""
    lines = [verdict_line(verdict) for verdict in comparison.quality.methods]
    words = ("accepted", "rejected", "inconclusive", NO_VERDICT)
    found = {word: [line.label.replace(", λ", " λ") for line in lines if line.word == word] for word in words}
    parts = [f"{word}: {', '.join(labels)}" for word, labels in found.items() if labels]
    return f"{parts[0][0].upper()}{parts[0][1:]}{''.join(f'; {part}' for part in parts[1:])}." if parts else ""


def verdict_notes(comparison: Comparison) -> list[str]:
    """What a reader needs beside the verdicts: tolerance, methods compared, seeds and what they vary."""
    quality, compared, seeds = comparison.quality, len(comparison.quality.methods), len(comparison.seeds)
    notes = []
    if quality.tolerance_ppl is not None:
        notes.append(f"PPL may rise by {quality.tolerance_ppl:.4g} ({quality.tolerance}).")
    if compared:
        notes.append(
            f"{compared} method{'s' if compared > 1 else ''} compared; each bound is one-sided at 95 % for one method "
            "alone, so among many methods some bound is wrong more often than that."
        )
    if quality.seed_varies:
        notes.append(f"{seeds} seed{'s' if seeds != 1 else ''}; a seed varies {quality.seed_varies}.")
    return notes
