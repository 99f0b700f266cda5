"""zloss: measure, report and intervene on Z-loss in PyTorch models.

Public names load on first use, so `zloss --help` answers without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from zloss import errors as errors
    from zloss.audit.loss.run import audit_loss as audit_loss
    from zloss.audit.router import audit_router as audit_router
    from zloss.distributed import global_normalizer as global_normalizer
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
    from zloss.source.explain import explain as explain
    from zloss.source.listing import centered_logits_from_raw as centered_logits_from_raw
    from zloss.source.listing import z_loss_source as z_loss_source
    from zloss.source.objective import Objective as Objective
    from zloss.source.objectives.centered import CenteredZLoss as CenteredZLoss
    from zloss.source.objectives.centered_head import CenteredHead as CenteredHead
    from zloss.source.objectives.cross_entropy import CrossEntropy as CrossEntropy
    from zloss.source.objectives.factorized import FactorizedZLoss as FactorizedZLoss
    from zloss.source.objectives.gain_aware import GainAwareZLoss as GainAwareZLoss
    from zloss.source.objectives.registry import make_objective as make_objective
    from zloss.source.objectives.registry import register_objective as register_objective
    from zloss.source.objectives.standard import StandardZLoss as StandardZLoss
    from zloss.source.statistics import TokenStats as TokenStats
    from zloss.train.record.record_run import record_run as record_run
    from zloss.train.record.recorded_config import RecordOptions as RecordOptions
    from zloss.train.record.validation import validation_blocks as validation_blocks
    from zloss.transport.head_loss import HeadLoss as HeadLoss
    from zloss.transport.head_loss import HeadLossOutput as HeadLossOutput
    from zloss.transport.head_loss import head_loss as head_loss
    from zloss.transport.head_source import head_source as head_source
    from zloss.transport.interventions import CenteredHeadWrapper as CenteredHeadWrapper
    from zloss.transport.interventions import center_head_ as center_head_
    from zloss.transport.interventions import shift_head_ as shift_head_
    from zloss.transport.logits_loss import logits_loss as logits_loss

_HOME = {
    "LossAudit": "results.loss_audit",
    "audit_loss": "audit.loss.run",
    "audit_router": "audit.router",
    "RouterFindings": "results.router",
    "MeasuredScale": "results.router",
    "measure_router_scale": "router.measure",
    "CenteredZLoss": "source.objectives.centered",
    "CenteredHead": "source.objectives.centered_head",
    "CrossEntropy": "source.objectives.cross_entropy",
    "FactorizedZLoss": "source.objectives.factorized",
    "GainAwareZLoss": "source.objectives.gain_aware",
    "explain": "source.explain",
    "global_normalizer": "distributed",
    "centered_logits_from_raw": "source.listing",
    "z_loss_source": "source.listing",
    "Objective": "source.objective",
    "make_objective": "source.objectives.registry",
    "register_objective": "source.objectives.registry",
    "RouterLoss": "router.loss",
    "router_loss": "router.loss",
    "RouterContext": "router.conventions",
    "RouterConvention": "router.conventions",
    "match_coefficient": "router.conventions",
    "router_scale": "router.conventions",
    "StandardZLoss": "source.objectives.standard",
    "TokenStats": "source.statistics",
    "RecordOptions": "train.record.recorded_config",
    "record_run": "train.record.record_run",
    "validation_blocks": "train.record.validation",
    "HeadLoss": "transport.head_loss",
    "HeadLossOutput": "transport.head_loss",
    "head_loss": "transport.head_loss",
    "head_source": "transport.head_source",
    "CenteredHeadWrapper": "transport.interventions",
    "center_head_": "transport.interventions",
    "shift_head_": "transport.interventions",
    "logits_loss": "transport.logits_loss",
}

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
