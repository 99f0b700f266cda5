"""The probe batches of an identification, and what a loss answers to them."""

from __future__ import annotations

import math

import torch

from zloss.audit.loss import probes
from zloss.audit.loss.callable import BlackBox
from zloss.audit.loss.outcome import Outcome
from zloss.audit.loss.output import LossCallError
from zloss.audit.loss.probes import Probe, Space
from zloss.audit.loss.reference import Reference


def make_probes(space: Space, seed: int) -> dict[str, Probe]:
    """The batches that every identification begins with, by name."""
    generator, sizes = seeded(seed), space.sizes()
    return {
        "mixed": probes.mixed(generator, **sizes),
        "saturated": probes.saturated(generator, wide=False, **sizes),
        "wide": probes.saturated(generator, wide=True, **sizes),
    }


def call_all(box: BlackBox, made: dict[str, Probe], dtype: torch.dtype) -> dict[str, Outcome]:
    """The finite answers to the probes, by name; an error where an ordinary batch gets none or has no gradient."""
    outcomes = {name: box(probe.logits_TV, probe.target_T, dtype=dtype) for name, probe in made.items()}
    ordinary = outcomes["mixed"]
    if not ordinary.finite:
        where = "loss" if not math.isfinite(ordinary.value) else "gradient"
        raise LossCallError(
            f"{box.name} gave a non-finite {where} on ordinary finite logits with valid targets: "
            "there is nothing to identify. Check it on `torch.randn(64, 96)` first."
        )
    if not ordinary.has_gradient:
        raise LossCallError(
            f"{box.name} returned a loss without a gradient (`requires_grad` is False): it cannot train anything. "
            "Return the loss before `.detach()`, and do not call it under `torch.no_grad()`."
        )
    return {name: outcome for name, outcome in outcomes.items() if outcome.finite}


def crowded_probe(box: BlackBox, space: Space, seed: int, dtype: torch.dtype) -> tuple[Probe, Outcome] | None:
    """A batch of nearly equal logits, and the answer to it; None where that is not finite."""
    probe = probes.crowded(seeded(seed), **space.sizes())
    outcome = box(probe.logits_TV, probe.target_T, dtype=dtype)
    return (probe, outcome) if outcome.finite else None


def joined_probe(parts: list[Probe]) -> Probe:
    """Several probes as one batch."""
    r = [probe.reference for probe in parts]
    joined = Reference(torch.cat([x.logits_TV for x in r]), torch.cat([x.target_T for x in r]), r[0].lanes)
    return Probe("joined", joined, torch.cat([probe.saturated_T for probe in parts]))


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers for one seed."""
    return torch.Generator().manual_seed(seed)
