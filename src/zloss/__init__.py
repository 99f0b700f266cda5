"""zloss: measure, report and intervene on Z-loss in PyTorch models.

Public names load on first use, so `zloss --help` answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from zloss import errors as errors
    from zloss.audit.loss.audit import audit_loss as audit_loss
    from zloss.audit.router import audit_router as audit_router
    from zloss.distributed import global_normalizer as global_normalizer
    from zloss.head.source import centered_logits_from_raw as centered_logits_from_raw
    from zloss.head.source import explain as explain
    from zloss.head.source import z_loss_source as z_loss_source
    from zloss.measure.logprob_gap import logprob_gap as logprob_gap
    from zloss.objectives import CenteredHead as CenteredHead
    from zloss.objectives import CenteredZLoss as CenteredZLoss
    from zloss.objectives import CrossEntropy as CrossEntropy
    from zloss.objectives import FactorizedZLoss as FactorizedZLoss
    from zloss.objectives import GainAwareZLoss as GainAwareZLoss
    from zloss.objectives import Objective as Objective
    from zloss.objectives import StandardZLoss as StandardZLoss
    from zloss.objectives import make_objective as make_objective
    from zloss.objectives import register_objective as register_objective
    from zloss.protocol.audit_model import AuditResult as AuditResult
    from zloss.protocol.audit_model import audit_model as audit_model
    from zloss.results.logprobs import LogprobGap as LogprobGap
    from zloss.results.loss_audit import LossAudit as LossAudit
    from zloss.results.router import MeasuredScale as MeasuredScale
    from zloss.results.router import RouterFindings as RouterFindings
    from zloss.router.conventions import RouterContext as RouterContext
    from zloss.router.conventions import RouterConvention as RouterConvention
    from zloss.router.conventions import match_coefficient as match_coefficient
    from zloss.router.conventions import router_scale as router_scale
    from zloss.router.loss import RouterLoss as RouterLoss
    from zloss.router.loss import router_loss as router_loss
    from zloss.router.measure import measure_router_scale as measure_router_scale
    from zloss.statistics import TokenStats as TokenStats
    from zloss.train.record import RecordOptions as RecordOptions
    from zloss.train.record import record_run as record_run
    from zloss.train.record import validation_blocks as validation_blocks

_NAMES = {
    "audit.loss.audit": "audit_loss",
    "audit.router": "audit_router",
    "distributed": "global_normalizer",
    "head.centering": "CenteredHeadWrapper center_head_ mu_center_ mu_loss_ shift_head_",
    "head.loss": "HeadLoss HeadLossOutput head_loss logits_loss",
    "head.source": "centered_logits_from_raw explain head_source z_loss_source",
    "measure.logprob_gap": "logprob_gap",
    "objectives": (
        "CenteredHead CenteredZLoss CrossEntropy FactorizedZLoss GainAwareZLoss Objective StandardZLoss "
        "make_objective register_objective"
    ),
    "protocol.audit_model": "AuditResult audit_model",
    "results.logprobs": "LogprobGap",
    "results.loss_audit": "LossAudit",
    "results.router": "MeasuredScale RouterFindings",
    "router.conventions": "RouterContext RouterConvention match_coefficient router_scale",
    "router.loss": "RouterLoss router_loss",
    "router.measure": "measure_router_scale",
    "statistics": "TokenStats",
    "train.record": "RecordOptions record_run validation_blocks",
}
"""Module → its public names."""
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", "errors", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("zloss.errors")
    if name in _HOME:
        value = getattr(importlib.import_module(f"zloss.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'zloss' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
