"""What a Trainer is set to do that would leave Z out of its loss: refused before the first step."""

from __future__ import annotations

from typing import Any

from zloss.errors import InputError, require_version
from zloss.telemetry.trackers import LEAST, require_tracker

LEAST_TRL = "1.16"


def refuse_bypasses(trainer: Any) -> None:
    """Raise for settings under which the model's own loss is not what the trainer minimises."""
    if not all(hasattr(trainer, part) for part in ("args", "model", "accelerator", "log")):
        raise InputError(
            f"`trainer` is expected to be a Trainer of transformers or TRL, but got {type(trainer).__name__}. A model takes "
            "`apply(model, objective)`."
        )
    args = trainer.args
    if any(kind.__module__.partition(".")[0] == "trl" for kind in type(trainer).__mro__):
        require_version("trl", LEAST_TRL, f"`attach` to a {type(trainer).__name__} of TRL", "trl")
    chosen_trackers = getattr(args, "report_to", None) or ()
    for name in chosen_trackers if isinstance(chosen_trackers, (list, tuple)) else (chosen_trackers,):
        if name in LEAST:
            require_tracker(name)
    if getattr(trainer, "label_smoother", None) is not None:
        raise InputError(
            "the trainer's label smoother computes the loss from logits, outside the model, so Z would be left out: set "
            "`label_smoothing_factor=0` in its arguments and pass `label_smoothing` to attach instead."
        )
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise InputError(
            "`compute_loss_func` computes the trainer's loss outside the model, so Z would be left out: call "
            "zloss.logits_loss inside that function instead of attaching."
        )
    if getattr(args, "loss_type", None) == "dft":
        raise InputError(
            '`loss_type="dft"` weights every token by its probability, which it takes from the loss; with Z in the loss '
            'that weight would be wrong: use `loss_type="nll"`.'
        )
    if getattr(args, "use_liger_kernel", False):
        chosen = getattr(args, "liger_kernel_config", None) or {}
        if chosen.get("fused_linear_cross_entropy", True):
            raise InputError(
                "Liger's fused cross-entropy would compute the loss instead: pass "
                '`liger_kernel_config={"fused_linear_cross_entropy": False}` beside `use_liger_kernel=True`.'
            )
    if getattr(args, "n_gpu", 1) > 1:
        raise InputError(
            f"this trainer would run nn.DataParallel over {args.n_gpu} GPUs, whose copies of the model share one handle: "
            "start it with `torchrun` or `accelerate launch`, one process per GPU."
        )
