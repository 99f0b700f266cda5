"""Quantities over optimizer steps: gradient tails, event rates, Adam state, training loss, tokens (metrics.json, steps.jsonl).

Norms are of all parameters as one vector. Tails are over steps with a finite value; rates count nonfinite steps as events.
"""

from __future__ import annotations

from zloss.results.quantities.definition import ENDPOINTS, Definition

OF_STEPS = "share of all steps"
SAMPLES = "p99 over sampled steps"
ADAM = "tab:adam_state_stress"


def _tails(key: str, symbol: str, meaning: str, unit: str = "", equation: str = ENDPOINTS) -> tuple[Definition, ...]:
    """p99, p99.9 and maximum over steps of one quantity of a step."""
    found = (("p99", "p99", "p99"), ("p999", "p99.9", "p99.9"), ("max", "max", "maximum"))
    return tuple(
        Definition(
            f"{key}_{suffix}",
            f"{name} {symbol}",
            f"{words} of {meaning}",
            unit,
            f"{words} over steps",
            equation,
            "lower",
        )
        for suffix, name, words in found
    )


def _rate(key: str, symbol: str, meaning: str, over: str = OF_STEPS) -> Definition:
    return Definition(key, symbol, meaning, "share", over, ENDPOINTS, "lower")


TAILS = (
    *_tails("grad_norm", "‖g‖₂", "the gradient norm before clipping"),
    *_tails("grad_inf", "‖g‖∞", "the largest gradient coordinate before clipping"),
    *_tails("grad_param_ratio", "‖g‖₂/‖θ‖₂", "the gradient norm before clipping relative to the parameters'"),
    *_tails("postclip_norm", "clipped ‖g‖₂", "the gradient norm after clipping"),
    *_tails("postclip_inf", "clipped ‖g‖∞", "the largest gradient coordinate after clipping"),
    *_tails("postclip_param_ratio", "clipped ‖g‖₂/‖θ‖₂", "the clipped gradient norm relative to the parameters'"),
    *_tails("loss", "L", "the training loss", "nat"),
    *_tails("train_ce", "training CE", "the training cross-entropy", "nat", ""),
)

EVENTS = (
    _rate("clip_rate", "clip rate", "share of steps whose gradient norm exceeds the clipping threshold"),
    *(
        _rate(f"phi_{threshold}", f"Φ_{threshold}", f"share of steps with ‖g‖₂ > {threshold} before clipping")
        for threshold in (10, 50, 100)
    ),
    _rate("nonfinite_gradient", "nonfinite gradients", "share of steps with a NaN or infinite gradient"),
    _rate("nonfinite_gradient_nan", "NaN gradients", "share of steps with a NaN in the gradient"),
    _rate("nonfinite_gradient_inf", "infinite gradients", "share of steps with an infinity and no NaN in the gradient"),
    _rate(
        "nonfinite_microbatch",
        "nonfinite micro-batches",
        "share of micro-batches with a NaN or infinite loss",
        "share of all micro-batches",
    ),
    _rate(
        "nonfinite_microbatch_nan",
        "NaN micro-batches",
        "share of micro-batches with a NaN loss",
        "share of all micro-batches",
    ),
    _rate(
        "nonfinite_microbatch_inf",
        "infinite micro-batches",
        "share of micro-batches with an infinite loss",
        "share of all micro-batches",
    ),
    _rate("spike_rate", "spike rate", "share of steps whose loss rises by more than the spike threshold"),
    Definition(
        "skipped_updates", "skipped updates", "steps without an update, their gradient being nonfinite", "steps"
    ),
)

ADAM_STATE = (
    Definition("adam_samples", "Adam samples", "steps at which the optimizer state was read", "steps"),
    Definition(
        "adam_v_max", "max ‖v‖∞", "largest second moment of Adam", "", "maximum over sampled steps", ADAM, "lower"
    ),
    Definition("adam_v_p99", "p99 ‖v‖∞", "p99 of the largest second moment of Adam", "", SAMPLES, ADAM, "lower"),
    Definition(
        "adam_d_inf_p99",
        "p99 ‖d‖∞",
        "p99 of the largest coordinate of Adam's proxy direction",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_d_ratio_p99",
        "p99 ‖d‖₂/‖θ‖₂",
        "p99 of Adam's proxy direction relative to the parameters",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_corrected_d_inf_p99",
        "p99 corrected ‖d‖∞",
        "p99 of the largest coordinate of Adam's bias-corrected direction",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
    Definition(
        "adam_corrected_d_ratio_p99",
        "p99 corrected ‖d‖₂/‖θ‖₂",
        "p99 of Adam's bias-corrected direction relative to the parameters",
        "",
        SAMPLES,
        ADAM,
        "lower",
    ),
)

RUN = (
    Definition("coef", "λ", "coefficient of the method's penalty", "", "", "eq:zloss"),
    Definition("seed", "seed", "seed of the run"),
    Definition("steps", "steps", "optimizer steps", "steps"),
    Definition(
        "tokens_consumed", "tokens consumed", "predictions trained on, repeats counted", "tokens", "", ENDPOINTS
    ),
    Definition("tokens_available", "tokens available", "predictions of the training text", "tokens", "", ENDPOINTS),
    Definition("reuse", "reuse", "tokens consumed over tokens available", "", "", ENDPOINTS),
    Definition("valid_predictions", "validation predictions", "predicted tokens of the validation blocks", "tokens"),
)

STEP = (
    Definition("step", "step", "number of the optimizer step, from 1"),
    Definition("loss", "L", "training loss of the step, CE and auxiliary", "nat", "sum over its micro-batches"),
    Definition(
        "cross_entropy", "CE", "training cross-entropy of the step", "nat", "mean over the step's tokens", "", "lower"
    ),
    Definition(
        "valid_ce",
        "validation CE",
        "cross-entropy of the first validation blocks while the run trains",
        "nat",
        "mean over their tokens",
        "",
        "lower",
    ),
    Definition("auxiliary", "auxiliary", "auxiliary part of the training loss", "nat", "mean over the step's tokens"),
    Definition(
        "grad_norm",
        "‖g‖₂ before clipping",
        "gradient norm of the step before clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition(
        "grad_inf",
        "‖g‖∞ before clipping",
        "largest gradient coordinate of the step before clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition("param_norm", "‖θ‖₂", "norm of the parameters before the step", "", "per step", ENDPOINTS),
    Definition(
        "postclip_norm", "clipped ‖g‖₂", "gradient norm of the step after clipping", "", "per step", ENDPOINTS, "lower"
    ),
    Definition(
        "postclip_inf",
        "clipped ‖g‖∞",
        "largest gradient coordinate of the step after clipping",
        "",
        "per step",
        ENDPOINTS,
        "lower",
    ),
    Definition(
        "norm_share",
        "share of steps at or above",
        "share of finite steps with a gradient norm at or above the value",
        "share",
        "all seeds together",
        ENDPOINTS,
    ),
)

ADAM_SAMPLE = (
    Definition("adam.param_norm", "‖θ‖₂", "norm of the parameters after the step", "", "per sampled step", ADAM),
    Definition("v_inf", "‖v‖∞", "largest second moment of Adam after the step", "", "per sampled step", ADAM, "lower"),
    Definition("d_norm", "‖d‖₂", "norm of Adam's proxy direction", "", "per sampled step", ADAM),
    Definition("d_inf", "‖d‖∞", "largest coordinate of Adam's proxy direction", "", "per sampled step", ADAM, "lower"),
    Definition(
        "corrected_d_norm", "corrected ‖d‖₂", "norm of Adam's bias-corrected direction", "", "per sampled step", ADAM
    ),
    Definition(
        "corrected_d_inf",
        "corrected ‖d‖∞",
        "largest coordinate of Adam's bias-corrected direction",
        "",
        "per sampled step",
        ADAM,
        "lower",
    ),
)
