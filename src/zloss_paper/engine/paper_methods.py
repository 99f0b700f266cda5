"""The paper's names of the methods, and ours."""

from __future__ import annotations

CE, CENTERED_HEAD, STANDARD = "CE baseline", "Centered head", "Standard Z-loss"
FACTORIZED, GAIN_AWARE, CENTERED = "Factorized Z-loss", "Gain-aware Z-loss", "Centered Z-loss"
METHODS = {
    CE: "ce",
    CENTERED_HEAD: "centered-head",
    STANDARD: "standard",
    FACTORIZED: "factorized",
    GAIN_AWARE: "gain-aware",
    CENTERED: "centered",
}
RAW_METHODS = (STANDARD, FACTORIZED, GAIN_AWARE)
"""Methods that penalise the log-normalizer of the raw logits."""
