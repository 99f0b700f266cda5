"""How one measured quantity is written and what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", ""]

PER_TOKEN = "per token"
MEAN_TOKENS = "mean over tokens"
P99_TOKENS = "p99 over tokens"
P999_TOKENS = "p99.9 over tokens"
OF_THE_HEAD = "of the head's weights"
DIAGNOSTIC_BATCH = "mean-reduced gradients of the diagnostic blocks"
ENDPOINTS = "app:setup_details"
"""Where the paper defines the endpoints over steps."""
METRICS = "app:diagnostic_conventions"
"""Where the paper defines its diagnostic metrics; they carry no equation label of their own."""


@dataclass(frozen=True)
class Definition:
    """A quantity under its key in the written files."""

    key: str
    """The key in JSON files; a dotted one ("source.cosine") where the last part alone names another quantity too."""
    symbol: str
    """As tables and axes write it: a letter with _sub and ^sup in the paper's notation, or a short name."""
    meaning: str
    """One sentence, without the full stop."""
    unit: str = ""
    """"nat", "share", "s", a count such as "tokens"; empty for a number without a unit."""
    over: str = ""
    """The scaling: what it is reduced over, and how."""
    equation: str = ""
    """Label in the paper of the equation, table or section that defines it; empty where the quantity is ours."""
    better: Better = ""
    """The direction that counts as an improvement; empty for descriptive quantities."""

    @property
    def axis(self) -> str:
        """The label of an axis: the symbol with its unit."""
        return f"{self.symbol} ({self.unit})" if self.unit in ("nat", "s") else self.symbol

    @property
    def hint(self) -> str:
        """The text of a tooltip: meaning, scaling, label in the paper."""
        facts = [fact for fact in (self.over, f"paper {self.equation}" if self.equation else "") if fact]
        return f"{self.meaning} ({'; '.join(facts)})" if facts else self.meaning
