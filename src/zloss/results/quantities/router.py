"""Quantities of routers: scale of the router Z-loss, routing, load. A decision is one token in one layer."""

from __future__ import annotations

from zloss.results.quantities.definition import Definition

DECISIONS = "mean over decisions"
SCALE = "prop:router_effective_coefficient"

ROUTER = (
    Definition("entropy", "entropy", "mean entropy of the router's softmax over experts", "nat", DECISIONS, "tab:moe"),
    Definition(
        "load_cv",
        "load CV",
        "standard deviation over mean of the routes per expert",
        "",
        "mean over layers",
        "tab:moe",
        "lower",
    ),
    Definition("s_rel", "s_rel", "scale of the router Z-loss relative to the token-layer mean, N_tl·α", "", "", SCALE),
    Definition("router_absolute", "λα", "coefficient of one routing decision, λ_R·α", "", "", SCALE),
    Definition("absolute", "λα", "coefficient of one routing decision, λ_R·α", "", "", SCALE),
    Definition("alpha", "α", "reduction weight of one routing decision", "", "", "eq:router_loss"),
    Definition(
        "relative", "s_rel", "scale of the router Z-loss relative to the token-layer mean, N_tl·α", "", "", SCALE
    ),
    Definition(
        "router_correction_norm",
        "mean ‖δ_h‖",
        "mean norm of the router Z-loss's source at the hidden state",
        "",
        DECISIONS,
        "tab:router",
    ),
    Definition(
        "router_log_z_p99",
        "p99 log Z_R",
        "p99 of the router's log-normalizer",
        "nat",
        "p99 over decisions",
        "eq:router_loss",
    ),
    Definition(
        "router_log_z_p999",
        "p99.9 log Z_R",
        "p99.9 of the router's log-normalizer",
        "nat",
        "p99.9 over decisions",
        "eq:router_loss",
    ),
    Definition(
        "router_log_z_max",
        "max log Z_R",
        "largest log-normalizer of a routing decision",
        "nat",
        "maximum over decisions",
        "eq:router_loss",
    ),
    Definition(
        "load_balance",
        "load balancing",
        "the model's own load-balancing term before its coefficient, about k at balance",
    ),
    Definition("load_balance_term", "load-balancing loss", "the load-balancing term as added to the loss"),
    Definition("router_z", "router Z", "the router Z-loss as added to the loss", "", DECISIONS, "eq:router_loss"),
    Definition(
        "dropped_routes",
        "dropped routes",
        "share of active routes that the model did not take",
        "share",
        "",
        "",
        "lower",
    ),
    Definition(
        "over_capacity",
        "over capacity",
        "share of routes that the stated capacity factor would drop",
        "share",
        "",
        "",
        "lower",
    ),
    Definition("router.top_k", "k", "experts that every token is sent to", "experts", "", "eq:router_loss"),
    Definition("router.coef", "λ_R", "coefficient of the router Z-loss as stated", "", "", "eq:router_loss"),
    Definition("applied_coef", "λ_R applied", "coefficient of the router Z-loss after matching", "", "", SCALE),
    Definition("load_balance_coef", "load-balancing coefficient", "coefficient of the load-balancing term"),
    Definition(
        "entropy_per_layer",
        "entropy by layer",
        "mean router entropy of each layer",
        "nat",
        "mean over tokens",
        "tab:moe",
    ),
    Definition("load_cv_per_layer", "load CV by layer", "load CV of each layer", "", "per layer", "tab:moe", "lower"),
    Definition("router.load", "load", "active routes that each expert received", "routes", "per layer and expert"),
    Definition(
        "delta_h_norm_mean",
        "mean ‖δ_h‖",
        "mean norm of the router Z-loss's source at the hidden state",
        "",
        DECISIONS,
        "tab:router",
    ),
    Definition(
        "max_loss_difference",
        "max |ΔL|",
        "largest difference of the training loss from the baseline's over all steps",
        "nat",
        "maximum over steps",
    ),
)
