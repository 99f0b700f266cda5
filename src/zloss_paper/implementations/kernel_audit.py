"""Losses on stored logits: the Triton CE+Z kernel, and PyTorch's built-in cross-entropy against a manual formula.

    zloss reproduce tab:triton_fused text:fused_audit_medium text:pytorch_backward_audit --profile paper

Δ_tot and Δ_Z of the kernel are those of the whole [T, V] gradient (Frobenius norms) against fp64 on the logits before storage;
kernel Δ_Z is against fp64 of the *stored* logits: what the kernel itself loses, its 16-bit output included. Cost: seconds on
a GPU; without one the kernel runs on Triton's interpreter, on a few tokens of each block.

The paper does not define PyTorch's two formulas further. Ours: `F.cross_entropy` on the stored logits, and `log_softmax` of
the same logits in fp32; Z is λ(logsumexp(z.float()) − c)² in both; the gradient arrives in the storage dtype. The difference
is ‖g_1 − g_2‖_F/‖g_2‖_F over a block, mean over blocks. Cost: 8 blocks, one forward pass and two backward passes of the loss
per line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch

from zloss.audit.config import AuditConfig
from zloss.audit.implementation.implementations import find_implementation, interpreted
from zloss.audit.implementation.kernels import KernelLine, gradient_difference
from zloss.audit.implementation.source import fp64_head, storage_dtype
from zloss.results.options import LogitStorage
from zloss_paper.engine.audited_models import AuditedModel, paper_target
from zloss_paper.engine.claims import Check, Claim, all_lines, among, between, falls, line_test, rises
from zloss_paper.engine.inputs import FINEWEB, WIKITEXT
from zloss_paper.engine.table import Cell, Line
from zloss_paper.engine.workbench import Workbench
from zloss_paper.implementations.recipe import (
    ImplementationConfig,
    audit_kernel,
    head_tokens,
    implementation_recipe,
    run_audits,
    stored_lines,
)

COLUMNS = {
    "rel_forward_error": "forward",
    "delta_total": "delta_total",
    "delta_z": "delta_z",
    "z_cosine": "z_cosine",
    "kernel_delta_z": "kernel_delta_z",
}
"""The columns, and where an audit of the kernel has them."""
STORAGES: tuple[LogitStorage, ...] = ("fp32", "bf16", "fp16")
CONSISTENT = 1e-6
MATERIAL = 10
SMALLER = 4
SMALL = 5e-3
FP16_BOUND = 2.8e-4
"""The paper's upper bound of all fp16 differences."""
FP32_ZERO = 5e-6
"""Half a unit of the last digit of the differences that the paper prints (1.40e-3, 2.8e-4)."""


TRITON = partial(audit_kernel, name="triton")
"""The audit of the Triton kernel."""


def kernel_lines(model: AuditedModel, audited: Sequence[KernelLine], *, left_out: str = "") -> list[Line]:
    """A line per storage, other than `left_out`, and multiplier; without a GPU the interpreter is a deviation."""
    if interpreted(find_implementation("triton")):
        tokens = f"{audited[0].tokens} tokens spread over the blocks"
        why = f"the kernel runs on Triton's interpreter, on {tokens}"
        model = replace(model, deviations=(*model.deviations, why))
    return stored_lines(model, audited, columns=COLUMNS, left_out=left_out)


CLAIMS = (
    Claim(
        "fp32_consistent",
        "The fp32 kernel matches the reference within 1e-6, total gradient and Z source.",
        all_lines(
            line_test(
                {"delta_total": "Δ_tot", "delta_z": "Δ_Z"},
                lambda total, z: max(total.low, z.low) <= CONSISTENT,
                {"delta_total": 2, "delta_z": 2},
            ),
            storage="fp32",
        ),
    ),
    Claim(
        "bf16_material",
        "A source-consistent kernel that reads bf16 logits still transports a different Z source, while its forward "
        "error stays small.",
        all_lines(
            line_test(
                {"rel_forward_error": "forward", "delta_z": "Δ_Z"},
                lambda forward, z: z.high >= MATERIAL * forward.low,
                {"rel_forward_error": 2},
            ),
            storage="bf16",
        ),
        f"Δ_Z at least {MATERIAL} times the forward error",
    ),
    Claim(
        "total_smaller",
        "With bf16 logits the error of the total CE+Z gradient is smaller than that of the Z source.",
        all_lines(
            line_test({"delta_total": "Δ_tot", "delta_z": "Δ_Z"}, lambda total, z: total.low < z.high), storage="bf16"
        ),
    ),
    Claim(
        "fp16_smaller",
        "At logit scale 4 fp16 logits give a much smaller error than bf16 logits.",
        among(
            lambda line: line.key["logit_scale"] == 4,
            between("storage", "bf16", "fp16", falls("delta_z", SMALLER)),
        ),
        f"much: by a factor of {SMALLER}",
    ),
)
MEDIUM_CLAIMS = (
    Claim(
        "grows_with_scale",
        "With bf16 logits the error of the Z source rises from logit scale 1 to 4 on both corpora.",
        among(lambda line: line.key["storage"] == "bf16", between("logit_scale", 1, 4, rises("delta_z"))),
    ),
)


class PyTorchDifference(NamedTuple):
    """The difference of PyTorch's two formulas at one storage and multiplier, mean over blocks."""

    storage: LogitStorage
    logit_scale: int
    delta_total: float


def pytorch_audit(bench: Workbench, audit: AuditConfig, config: ImplementationConfig) -> list[PyTorchDifference]:
    """The difference of PyTorch's two formulas at every storage and multiplier."""
    tokens = head_tokens(bench, audit)
    head = fp64_head(tokens.head)
    builtin, manual = find_implementation("torch-ce"), find_implementation("log-softmax")
    found: dict[tuple[LogitStorage, int], list[float]] = {}
    parts = (torch.split(part, tokens.block_size) for part in (tokens.hidden_TD, tokens.label_T))
    with bench.progress.step("PyTorch backward", len(tokens.label_T)) as step:
        for hidden_TD, label_T in zip(*parts, strict=True):
            z_TV = head.logits(hidden_TD.double())
            for storage in config.storages:
                for scale in config.logit_scales:
                    stored_TV = (z_TV * scale).to(storage_dtype(storage))
                    value = gradient_difference(
                        builtin, manual, stored_TV, label_T, coef=config.coef, target=tokens.target
                    )
                    found.setdefault((storage, scale), []).append(value)
            step.advance(len(label_T))
    return [PyTorchDifference(*key, fmean(values)) for key, values in found.items()]


def _difference(storage: str, holds: Callable[[Cell], bool]) -> Check:
    return all_lines(line_test({"delta_total": ""}, holds, {"delta_total": 3}), storage=storage)


PYTORCH_CLAIMS = (
    Claim(
        "close",
        "The built-in cross-entropy stays close to the manual formula in bf16, far closer than a source rebuilt from "
        "bf16 logits is to its reference.",
        _difference("bf16", lambda found: found.low <= SMALL),
        f"close: a relative difference of {SMALL:g} at most",
    ),
    Claim(
        "fp16_bound",
        "In fp16 the difference is below 2.8e-4.",
        _difference("fp16", lambda found: found.low < FP16_BOUND),
        "the paper's bound, on our model and text too",
    ),
    Claim(
        "fp32_zero",
        "In fp32 the difference is zero within reporting precision.",
        _difference("fp32", lambda found: found.low <= FP32_ZERO),
        f"zero: at most {FP32_ZERO:g}",
    ),
)
RECIPES = (
    # Expected: fp32 within 1e-6; bf16 Δ_Z 0.056 (WikiText-103, × 1) … 0.204 (FineWeb-Edu, × 4) with a forward error below
    # 3e-4, Δ_tot smaller than Δ_Z.
    implementation_recipe(
        "tab:triton_fused",
        "A source-consistent Triton CE+Z kernel on stored logits",
        run_audits(TRITON, kernel_lines, details="kernel_rows"),
        columns=COLUMNS,
        targets=(paper_target("GPT-2", WIKITEXT, 8), paper_target("GPT-2", FINEWEB, 8)),
        storages=STORAGES,
        logit_scales=(1, 4),
        claims=CLAIMS,
        kernel=True,
    ),
    # Expected: bf16 Δ_Z 0.050 and 0.164 (WikiText-103), 0.0696 and 0.186 (FineWeb-Edu) at logit × 1 and 4; Δ_tot 0.033 …
    # 0.134; fp32 below 1e-6.
    implementation_recipe(
        "text:fused_audit_medium",
        "The fused-kernel audit on GPT-2 Medium logits",
        run_audits(TRITON, partial(kernel_lines, left_out="fp16")),
        columns=COLUMNS,
        targets=(paper_target("GPT-2 Medium", WIKITEXT, 8), paper_target("GPT-2 Medium", FINEWEB, 8)),
        storages=STORAGES,
        logit_scales=(1, 4),
        claims=MEDIUM_CLAIMS,
        kernel=True,
    ),
    # Expected: bf16 differences of 1.0e-3 … 1.5e-3, fp16 below 2.8e-4, fp32 zero: far below the source error of the same
    # storage.
    implementation_recipe(
        "text:pytorch_backward_audit",
        "Built-in cross-entropy + Z against manual log-softmax + Z",
        run_audits(pytorch_audit, partial(stored_lines, columns={"delta_total": "delta_total"})),
        columns=("delta_total",),
        targets=(
            paper_target("GPT-2", WIKITEXT, 8),
            paper_target("GPT-2", FINEWEB, 8),
            paper_target("GPT-2 Medium", FINEWEB, 8),
        ),
        storages=STORAGES,
        logit_scales=(1, 2, 4),
        claims=PYTORCH_CLAIMS,
    ),
)
