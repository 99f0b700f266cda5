"""What a comparable Z-loss report should state, item by item, and where our results state it.

After the reporting recommendations of the paper; each item names the places in results of zloss that cover it and the
command that writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zloss.results.files import Kind as ResultKind

Kind = ResultKind | Literal["metrics"]
"""A kind of result, or the metrics.json of one run."""
Place = tuple[Kind, str]
"""A kind of result and a dotted path in it; `*` stands for every member of a list."""
Scope = Literal["every model", "tied head", "router"]


@dataclass(frozen=True)
class Item:
    """One thing to report."""

    id: str
    group: str
    text: str
    places: tuple[Place, ...]
    command: str
    """What to run where it is missing."""
    scope: Scope = "every model"


AUDIT, LOSS, TRAIN, MOE = "zloss audit", "zloss audit-loss", "zloss compare", "zloss train --moe"
IMPLEMENTATION = "zloss audit-implementation"
DENSE, SOURCE, OPTIMIZER, ROUTER = "dense output head", "backward source", "optimizer and events", "router"


def _metric(*names: str) -> tuple[Place, ...]:
    """A training metric, alone or inside a comparison."""
    return tuple(
        place
        for name in names
        for place in (
            ("metrics", name),
            ("comparison", f"methods.*.metrics.{name}"),
            ("comparison", f"methods.*.{name}"),
        )
    )


def _audit(*paths: str) -> tuple[Place, ...]:
    return tuple(("audit", path) for path in paths)


def _loss(*paths: str) -> tuple[Place, ...]:
    return tuple(("loss-audit", path) for path in paths)


def _implementation(*paths: str) -> tuple[Place, ...]:
    return tuple(("implementation-audit", path) for path in paths)


def _router(name: str) -> tuple[Place, ...]:
    """A setting of the router loss that a run trained with, alone or inside a comparison."""
    return (("metrics", f"router.{name}"), ("comparison", f"router.conventions.*.{name}"))


def _routed(name: str) -> tuple[Place, ...]:
    """A setting that all router losses of a comparison share."""
    return (("metrics", f"router.{name}"), ("comparison", f"router.{name}"))


ITEMS = (
    Item("lambda_aux", DENSE, "applied coefficient λ_aux", _loss("identified.coef") + _metric("coef"), TRAIN),
    Item("lambda_diag", DENSE, "diagnostic coefficient λ_diag", _audit("diag_coef") + _metric("diag_coef"), AUDIT),
    Item("target", DENSE, "target c", _audit("target") + _loss("identified.target") + _metric("target"), AUDIT),
    Item(
        "convention",
        DENSE,
        "logit convention of the numbers: raw or row-centered",
        _audit("heads.raw.p_z_999") + _loss("identified.coordinate") + _metric("coordinate"),
        AUDIT,
    ),
    Item("tied", DENSE, "whether embeddings are tied", _audit("model.tied"), AUDIT),
    Item(
        "auxiliary_coordinate",
        DENSE,
        "whether the auxiliary is applied to raw or deployed logits",
        _loss("identified.coordinate") + _metric("coordinate"),
        LOSS,
    ),
    Item("quality", DENSE, "validation quality (PPL)", _audit("ppl") + _metric("ppl"), AUDIT),
    Item("p_z_999", DENSE, "log-normalizer tail P_Z^99.9", _audit("heads.raw.p_z_999") + _metric("p_z_999"), AUDIT),
    Item("a_p_99", DENSE, "gain tail A_p^99", _audit("heads.raw.a_p_99") + _metric("a_p_99"), AUDIT),
    Item("grad_norm", DENSE, "p99 or p99.9 gradient norm", _metric("grad_norm_p99", "grad_norm_p999"), TRAIN),
    Item("grad_inf", DENSE, "maximum-coordinate gradient tail", _metric("grad_inf_p99"), TRAIN),
    Item("grad_param_ratio", DENSE, "gradient-to-parameter norm ratio", _metric("grad_param_ratio_p99"), TRAIN),
    Item("clip_rate", DENSE, "gradient clipping frequency", _metric("clip_rate"), TRAIN),
    Item("r_z", DENSE, "auxiliary-to-CE gradient ratio", _audit("gradient.raw.r_z") + _metric("r_aux"), AUDIT),
    Item("c_z", DENSE, "auxiliary-to-CE cosine", _audit("gradient.raw.c_z") + _metric("c_aux"), AUDIT),
    Item("clip_convention", DENSE, "pre-clip or post-clip gradient norms", _metric("postclip_norm_p99"), TRAIN),
    Item(
        "tied_paths",
        DENSE,
        "output-path and input-path auxiliary gradient norms",
        _audit("tied_paths.raw.input_norm") + _metric("tied_paths"),
        AUDIT,
        "tied head",
    ),
    Item(
        "forward_error",
        SOURCE,
        "forward error against high precision",
        _loss("source.forward_rel_error") + _implementation("source.*.forward_rel_error"),
        LOSS,
    ),
    Item(
        "total_error",
        SOURCE,
        "relative error of the total CE+Z logit gradient",
        _loss("source.delta_total") + _implementation("implementations.*.delta_total"),
        LOSS,
    ),
    Item(
        "source_error",
        SOURCE,
        "relative error of the Z-loss source",
        _loss("source.delta_src") + _implementation("source.*.delta_src"),
        LOSS,
    ),
    Item(
        "source_cosine",
        SOURCE,
        "cosine to the high-precision source",
        _loss("source.cosine") + _implementation("source.*.backward_cosine"),
        LOSS,
    ),
    Item(
        "total_cosine",
        SOURCE,
        "cosine of the total CE+Z gradient to the high-precision one",
        _loss("target_model.total_cosine") + _implementation("implementations.*.total_cosine"),
        IMPLEMENTATION,
    ),
    Item(
        "corpus_logits",
        SOURCE,
        "the source audited on target-model logits from the relevant text",
        _loss("target_model.delta_src") + _implementation("source.*.delta_src"),
        IMPLEMENTATION,
    ),
    Item(
        "update_error",
        SOURCE,
        "an optimizer-facing check: parameter-gradient and Adam-direction error",
        _implementation("updates.*.adam_dir_rel_error"),
        IMPLEMENTATION,
    ),
    Item("nonfinite_microbatch", OPTIMIZER, "nonfinite-microbatch rate", _metric("nonfinite_microbatch"), TRAIN),
    Item("nonfinite_gradient", OPTIMIZER, "nonfinite-gradient rate", _metric("nonfinite_gradient"), TRAIN),
    Item(
        "nan_and_inf",
        OPTIMIZER,
        "NaN and Inf counted apart",
        _audit("nonfinite.nan") + _metric("nonfinite_gradient_nan"),
        AUDIT,
    ),
    Item("event_rates", OPTIMIZER, "thresholded gradient-event rates", _metric("phi_10", "phi_50", "phi_100"), TRAIN),
    Item("grad_tails", OPTIMIZER, "finite-only gradient tails, up to the maximum", _metric("grad_norm_max"), TRAIN),
    Item(
        "fp16_margin",
        OPTIMIZER,
        "static fp16 loss-scale margin",
        _implementation("overflow.*.kappa_min") + _metric("kappa_min"),
        IMPLEMENTATION,
    ),
    Item("adam_v", OPTIMIZER, "Adam second-moment tails", _metric("adam_v_max", "adam_v_p99"), TRAIN),
    Item("adam_d", OPTIMIZER, "Adam update-state tails", _metric("adam_d_inf_p99", "adam_d_ratio_p99"), TRAIN),
    Item("loss_tail", OPTIMIZER, "loss spikes or training-loss tail", _metric("spike_rate", "loss_p99"), TRAIN),
    # An audit's own `router.coef` and `router.convention` are the defaults it diagnoses with, not what a loss applies: of an
    # audit only the scale measured from the model's own loss counts.
    Item("lambda_r", ROUTER, "nominal λ_R", _audit("router.applied.coef") + _router("coef"), MOE, "router"),
    Item("reduction", ROUTER, "reduction convention", _router("convention"), MOE, "router"),
    Item("top_k", ROUTER, "top-k", _audit("router.top_k") + _routed("top_k"), MOE, "router"),
    Item(
        "denominator",
        ROUTER,
        "token-layer denominator",
        _audit("router.decisions") + _routed("decisions"),
        MOE,
        "router",
    ),
    Item(
        "absolute",
        ROUTER,
        "absolute coefficient per decision",
        _audit("router.applied.absolute_per_layer") + _metric("router_absolute") + _router("absolute"),
        MOE,
        "router",
    ),
    Item(
        "relative",
        ROUTER,
        "scale relative to the token-layer mean",
        _audit("router.applied.relative") + _metric("s_rel") + _router("s_rel"),
        MOE,
        "router",
    ),
    Item(
        "capacity",
        ROUTER,
        "capacity policy and dropped-route fraction, where capacity is enforced",
        _metric("dropped_routes", "over_capacity"),
        MOE,
        "router",
    ),
    Item("load_cv", ROUTER, "expert load CV", _audit("router.load_cv") + _metric("load_cv"), AUDIT, "router"),
    Item("entropy", ROUTER, "router entropy", _audit("router.entropy") + _metric("entropy"), AUDIT, "router"),
    Item("correction", ROUTER, "router correction norm", _metric("router_correction_norm"), MOE, "router"),
)
