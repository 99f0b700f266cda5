"""`attach`: a Trainer trains with CE + Z and logs what its head does, in every tracker it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from zloss.errors import InputError
from zloss.head.options import Backend
from zloss.integrations.moe import RouterZLoss
from zloss.integrations.transformers.apply import apply
from zloss.integrations.transformers.trainer_attachment import TrainerAttachment
from zloss.integrations.transformers.trainer_checks import refuse_bypasses
from zloss.integrations.transformers.trainer_settings import experiment_settings, training_data
from zloss.objectives import Objective
from zloss.telemetry.alert_action import OnAlert, alert_action
from zloss.telemetry.logged_scalars import Scalars, chosen_names
from zloss.telemetry.window import DEFAULT_WINDOW, StepWindow
from zloss.text.blocks import Blocks
from zloss.train.record.record_run import record_run
from zloss.train.record.recorded_config import RecordOptions
from zloss.train.record.run_recorder import RunRecorder


def attach(
    trainer: Any,
    objective: Objective,
    *,
    on_alert: OnAlert = "log",
    label_smoothing: float = 0.0,
    router: RouterZLoss | None = None,
    window: int = DEFAULT_WINDOW,
    scalars: Scalars = "all",
    backend: Backend = "auto",
    record: str | os.PathLike[str] | None = None,
    validation: Blocks | Tensor | Sequence[Sequence[int]] | None = None,
    record_options: RecordOptions | None = None,
) -> TrainerAttachment:
    """From now on the trainer minimises CE + Z and logs `zloss/…` scalars over its last `window` steps.

    `trainer`: a Trainer of transformers or an SFTTrainer of TRL (≥ 1.16), before `train()`. Every tracker in its
    `report_to` gets the scalars with its other numbers. CE and Z stand apart as zloss/ce and zloss/z, in nats per
    predicted token; `zloss.statistics` lists the other names. On several processes they are of the tokens of
    all of them, joined in one collective per log. `scalars="main"` logs ten of them, a list of names these; alerts see
    all of them whatever is logged.

    `on_alert`: what is done when a tail changes (`zloss.telemetry.alerts` has the rule, counted in logs): "log" a
    warning, "raise" an error, or a function of the alert.

    `record`: a folder. The run is written into `record/<method>-<λ>-s<seed>/` with its step records and, when training
    ends, the numbers of the trained model on `validation` (see `zloss.record_run`); `zloss compare record` judges the
    methods. `record_options`: what is measured beside that.

    Refused: settings under which the trainer computes its loss outside the model. A step that bypassed the loss all the
    same raises at its end.

    >>> from zloss.integrations.transformers import attach
    >>> attach(trainer, zloss.CenteredZLoss(1e-4))  # doctest: +SKIP
    """
    refuse_bypasses(trainer)
    alert_action(on_alert)  # checks itself
    names = chosen_names(scalars)
    if (record is None) != (validation is None):
        raise InputError(
            "`record` and `validation` belong together: a recorded run is measured on `validation` when it ends, and "
            "nothing else needs it."
        )
    handle = apply(
        trainer.model,
        objective,
        label_smoothing=label_smoothing,
        router=router,
        backend=backend,
    )
    try:
        recorder = None
        if record is not None and validation is not None:
            recorder = _recorder(trainer, objective, record, validation, record_options, label_smoothing, router)
        across = StepWindow(window, objective.coordinate, across_ranks=True)
        return TrainerAttachment(trainer, handle, across, on_alert, names, recorder)
    except BaseException:
        handle.remove()
        raise


def _recorder(
    trainer: Any,
    objective: Objective,
    record: str | os.PathLike[str],
    validation: Blocks | Tensor | Sequence[Sequence[int]],
    options: RecordOptions | None,
    label_smoothing: float,
    router: RouterZLoss | None,
) -> RunRecorder:
    args = trainer.args
    settings = experiment_settings(args) | {"label_smoothing": label_smoothing}
    if router is not None:
        settings["router"] = {name: str(value) for name, value in asdict(router).items()}
    return record_run(
        record,
        trainer.model,
        objective,
        seed=args.seed,
        validation=validation,
        clip=args.max_grad_norm or None,
        settings=settings,
        training_data=training_data(trainer.train_dataset),
        loop=type(trainer).__name__,
        options=options,
    )
