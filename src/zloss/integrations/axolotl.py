"""axolotl: a plugin that trains with CE + Z, set up by a `zloss:` section in the YAML file.

    plugins:
      - zloss.integrations.axolotl.ZLossPlugin
    zloss:
      objective: standard
      coef: 1.0e-4
      target: 0.0
      router: {coef: 1.0e-3, target: 0.0}

The section is checked when axolotl reads the file; `attach` connects the trainer once it exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from zloss.errors import InputError, MissingDependencyError, UnknownNameError, require_version
from zloss.integrations.moe import RouterZLoss
from zloss.integrations.transformers import TrainerAttachment, attach
from zloss.objectives import CenteredHead, CrossEntropy, Objective, check_coefficient, make_objective
from zloss.router.conventions import find_convention
from zloss.telemetry.alerts import alert_action
from zloss.telemetry.trackers import chosen_names

LEAST_AXOLOTL = "0.19"
"""The one version tested."""
try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise MissingDependencyError(f"axolotl>={LEAST_AXOLOTL}", "ZLossPlugin", "axolotl") from error

KEYS = ("objective", "coef", "target", "label_smoothing", "router", "scalars", "on_alert")
OTHER_LOSSES = (
    *("cut_cross_entropy", "chunked_cross_entropy", "flash_attn_cross_entropy", "liger_cross_entropy"),
    *("liger_fused_linear_cross_entropy", "use_eaft", "orpo_alpha", "rl"),
)
"""Settings of axolotl under which another function computes the training loss."""


class ZLossArgs(BaseModel):
    """The key that the plugin adds to axolotl's configuration."""

    zloss: dict[str, Any] | None = None


class ZLossPlugin(BasePlugin):  # type: ignore[misc]
    """Training loss CE + Z, `zloss/…` scalars in axolotl's logs, alerts on changes; `attachment` is what `attach` returned."""

    attachment: TrainerAttachment | None = None

    def register(self, cfg: Any) -> None:
        """Check the section while axolotl reads its configuration."""
        if self._requested(cfg):
            # Here, since axolotl prints errors of imports and trains on without the plugin.
            require_version("axolotl", LEAST_AXOLOTL, "ZLossPlugin", "axolotl")
            attach_arguments(cfg)

    def get_input_args(self) -> str:
        return f"{__name__}.{ZLossArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        if self._requested(cfg):
            self.attachment = attach(trainer, **attach_arguments(cfg))

    def _requested(self, cfg: Any) -> bool:
        """Whether this configuration lists the plugin: axolotl keeps plugins of earlier ones in the same process."""
        return f"{__name__}.{type(self).__name__}" in (cfg.get("plugins") or [])


def attach_arguments(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `attach` for axolotl's configuration; an error of one sentence for what cannot be used."""
    section = cfg.get("zloss")
    if not isinstance(section, Mapping):
        raise InputError(
            "ZLossPlugin needs a section `zloss:` in the axolotl configuration with `objective`, `coef` and `target`, but got "
            f"{section!r}."
        )
    _refuse_unknown("zloss", section, KEYS)
    for key in cfg:
        if str(key).startswith("zloss") and key != "zloss":
            raise InputError(
                f"`{key}` is not a key of axolotl: settings of ZLossPlugin belong in the section `zloss:`."
            )
    for key in OTHER_LOSSES:
        if cfg.get(key):
            raise InputError(
                f"`{key}: {cfg[key]}` makes another function compute the training loss, so Z would be left out: remove it or "
                "ZLossPlugin."
            )
    for key in ("context_parallel_size", "tensor_parallel_size"):
        if int(cfg.get(key) or 1) > 1:
            raise InputError(f"ZLossPlugin supports data parallelism only, but got `{key}: {cfg[key]}`: set it to 1.")
    chosen_names(section.get("scalars", "all"))  # validates it before the model is loaded, as the next line does
    alert_action(section.get("on_alert", "log"))
    found = {name: section[name] for name in ("scalars", "on_alert") if name in section}
    if "label_smoothing" in section:
        found["label_smoothing"] = _number("zloss", section, "label_smoothing")
    if "router" in section:
        found["router"] = _router(section["router"])
    return {"objective": _objective(section)} | found


def _objective(section: Mapping[str, Any]) -> Objective:
    """The objective by name. Cross-entropy has no coefficient and no target: the plugin then only logs."""
    name: Any = section.get("objective")
    if make_objective(name, None) in (CrossEntropy(), CenteredHead()):
        return make_objective(name, None)
    coef = _number("zloss", section, "coef")
    return make_objective(name, coef, target=_number("zloss", section, "target", or_word="log_vocab"))


def _router(section: Any) -> RouterZLoss:
    if not isinstance(section, Mapping):
        raise InputError(f"`zloss.router` is expected to be a section with `coef` and `target`, but got {section!r}.")
    _refuse_unknown("zloss.router", section, [field.name for field in fields(RouterZLoss)])
    coef = _number("zloss.router", section, "coef")
    target = _number("zloss.router", section, "target", or_word="log_experts")
    router = RouterZLoss(**dict(section) | {"coef": coef, "target": target})
    check_coefficient("zloss.router.coef", router.coef)
    find_convention(router.convention)
    return router


def _refuse_unknown(path: str, section: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in section:
        if key not in known:
            raise UnknownNameError(f"key of `{path}:`", key, known)


def _number(path: str, section: Mapping[str, Any], key: str, or_word: str | None = None) -> float | None:
    """A number of a section; None for `or_word`. YAML reads 1e-4, without a point, as text."""
    value = section.get(key)
    if or_word is not None and value == or_word:
        return None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
    choice = "a number" if or_word is None else f"a number (0.0 in most codebases) or {or_word!r}"
    raise InputError(
        f"`{path}.{key}` is expected to be {choice}, but {'is missing' if value is None else f'got {value!r}'}."
    )
