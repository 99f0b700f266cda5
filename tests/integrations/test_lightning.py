"""The Lightning callback: losses equal eager CE + Z, scalars reach the logger, evaluation mode raises."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.transformers.small_models import OBJECTIVE, batch, small, truth
from zloss.errors import InputError, UnsupportedModelError

lightning = pytest.importorskip("lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from zloss.integrations.lightning import ZLossCallback  # noqa: E402


class Module(lightning.LightningModule):
    def __init__(self, name: str = "model") -> None:
        super().__init__()
        setattr(self, name, small())
        self.losses: list[float] = []

    def training_step(self, inputs: Any, _index: int) -> Any:
        loss = self.model(**inputs).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(module: Any, callback: ZLossCallback, folder: Path, steps: int = 2, **settings: Any) -> list[dict[str, str]]:
    """Train; the rows of the log."""
    settings |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    settings |= {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3, "accelerator": "cpu", "log_every_n_steps": 1}
    trainer = lightning.Trainer(max_steps=steps, callbacks=[callback], logger=CSVLogger(folder), **settings)
    data = [batch(seed) for seed in range(2 * steps)]
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    (file,) = folder.rglob("metrics.csv")
    return list(csv.DictReader(file.open()))


def test_a_training_step_may_return_the_whole_output(tmp_path: Path) -> None:
    """Lightning detaches and moves every tensor in it; there are no logits among them."""

    class Whole(Module):
        def training_step(self, inputs: Any, _index: int) -> Any:
            output = self.model(**inputs)
            return {"loss": output.loss, "output": output, "logits": output.logits}

    callback = ZLossCallback(OBJECTIVE)
    fit(Whole(), callback, tmp_path)
    assert len(callback.window) == 2


def test_losses_norms_and_scalars(tmp_path: Path) -> None:
    module = Module()
    wanted = [float(truth(small(), batch(seed))[0]) for seed in range(4)]
    rows = fit(module, ZLossCallback(OBJECTIVE, window=1), tmp_path)
    assert module.losses == pytest.approx(wanted, rel=1e-5)
    assert len(rows) == 2
    for step, row in enumerate(rows):
        grads = [truth(small(), batch(2 * step + place))[1] for place in range(2)]
        mean = [(one + other) / 2 for one, other in zip(*grads, strict=True)]
        norm = torch.cat([grad.flatten() for grad in mean]).norm()
        assert float(row["zloss/grad_norm_preclip"]) == pytest.approx(float(norm), rel=1e-3)
        pair = wanted[2 * step : 2 * step + 2]
        assert float(row["zloss/ce"]) + float(row["zloss/z"]) == pytest.approx(sum(pair) / 2, rel=1e-4)
    assert not module.model._forward_hooks


def test_a_choice_of_scalars_is_logged_and_clipping_by_value_has_no_clip_rate(tmp_path: Path) -> None:
    """The limit of an entry was compared with the norm of all of them."""
    callback = ZLossCallback(OBJECTIVE, scalars=["ce", "grad_norm_preclip", "clip_rate"])
    (row,) = fit(Module(), callback, tmp_path, steps=1, gradient_clip_algorithm="value")
    assert {name for name in row if name.startswith("zloss/")} == {"zloss/ce", "zloss/grad_norm_preclip"}
    with pytest.raises(InputError, match=r"unknown scalar: 'cee'\. Did you mean 'ce'"):
        ZLossCallback(OBJECTIVE, scalars=["cee"])


def test_evaluation_mode_and_another_attribute_raise_before_the_first_step(tmp_path: Path) -> None:
    module = Module()
    module.model.eval()
    with pytest.raises(UnsupportedModelError, match="evaluation mode"):
        fit(module, ZLossCallback(OBJECTIVE), tmp_path)
    with pytest.raises(InputError, match="has no attribute 'model'"):
        fit(Module("net"), ZLossCallback(OBJECTIVE), tmp_path)
