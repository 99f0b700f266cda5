"""ZLossCrossEntropy in NeMo AutoModel's fine-tuning recipe, against fp64 gradient descent on whole logits.

Stand-ins, since the recipe expects a GPU: `build_model` (it places the model on a CUDA device), CUDA's peak memory, and
`triton.autotune` while AutoModel is imported (triton 3.9 refuses the arguments that it gets for one kernel).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zloss
from tests.integrations.framework_table import check_and_record
from tests.integrations.ranks import on_ranks
from tests.integrations.transformers.small_models import VOCAB, small
from zloss.errors import CoefficientError, InputError, UnsupportedModelError

pytest.importorskip("nemo_automodel", reason="nemo-automodel is not installed: python -m tools.frameworks nemo")
pytest.importorskip("torchao", reason="AutoModel's recipe imports torchao: python -m tools.frameworks nemo")
with pytest.MonkeyPatch.context() as patch:
    patch.setattr("triton.autotune", lambda *_, **__: lambda kernel: kernel)
    from nemo_automodel.recipes.llm import train_ft
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.datasets.llm.mock import build_unpacked_dataset
from nemo_automodel.components.launcher.interactive import resolve_recipe_cls
from nemo_automodel.components.loss import build_loss_module
from nemo_automodel.components.loss.utils import calculate_loss

from zloss.integrations.nemo import ZLossCrossEntropy, ZLossRecipe

STEPS, RATE, COEF, SENTENCES = 4, 0.1, 0.1, 8
DATA = {
    "num_sentences": SENTENCES,
    "mean_len": 12,
    "std_len": 3,
    "vocab_size": VOCAB,
    "max_sentence_len": 20,
    "seed": 0,
}
CASES = {
    # name: processes, sequences per micro-batch, how the model is wrapped
    "1 process": (1, 8, "none"),
    "4 micro-batches": (1, 2, "none"),
    "DDP, 2 processes, 2 micro-batches": (2, 2, "ddp"),
    "FSDP2, 2 processes, 2 micro-batches": (2, 2, "fsdp2"),
}


def settings(local: int, strategy: str) -> Any:
    """The YAML file of a user, as AutoModel reads it. A step is one pass over all sentences."""
    parts = "nemo_automodel.components"
    data = {"_target_": f"{parts}.datasets.llm.mock.build_unpacked_dataset", "tokenizer": None, **DATA}
    loader = {
        "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
        "collate_fn": f"{parts}.datasets.utils.default_collater",
    }
    steps = {"global_batch_size": SENTENCES, "local_batch_size": local, "num_epochs": STEPS, "max_steps": STEPS}
    return ConfigNode(
        {
            "loss_fn": {"_target_": "zloss.integrations.nemo.ZLossCrossEntropy", "coef": COEF, "target": 0.0},
            "step_scheduler": steps | {"ckpt_every_steps": 1000, "val_every_steps": STEPS},
            "dist_env": {"backend": "gloo", "timeout_minutes": 1},
            "rng": {"_target_": f"{parts}.training.rng.StatefulRNG", "seed": 1, "ranked": True},
            "model": {"_target_": "transformers.AutoModelForCausalLM.from_config"},
            "distributed": {"strategy": "ddp" if strategy == "none" else strategy},
            "checkpoint": {"enabled": False, "checkpoint_dir": tempfile.mkdtemp()},
            "clip_grad_norm": {"max_norm": 1e6},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": RATE},
            "dataset": data,
            "dataloader": loader,
            "validation_dataset": data,
            "validation_dataloader": loader,
        }
    )


def flat(model: Any) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in whole])


def in_recipe(processes: int, local: int, wrap: str) -> dict[str, Any]:
    """Parameters after the run, and what the recipe logged."""

    def run() -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats = lambda *_: None  # type: ignore[assignment]
        bare = small()
        wrapped: dict[str, Any] = {"none": lambda model: model, "ddp": DistributedDataParallel, "fsdp2": fully_shard}
        train_ft.build_model = lambda *_, **__: wrapped[wrap](bare)
        recipe = ZLossRecipe(settings(local, wrap))
        recipe.setup()
        assert isinstance(bare.lm_head.weight, DTensor) == (wrap == "fsdp2")
        logs: dict[str, list[Any]] = {"train": [], "val": []}
        for kind in logs:
            _keep(recipe, f"log_{kind}_metrics", logs[kind])
        recipe.run_train_validation_loop()
        return {"parameters": flat(bare).tolist(), **logs}

    return on_ranks(processes, run)  # type: ignore[no-any-return]


def _keep(recipe: Any, name: str, kept: list[Any]) -> None:
    """Keep the metrics that the recipe logs."""
    log = getattr(recipe, name)

    def logged(*args: Any, **kwargs: Any) -> None:
        log(*args, **kwargs)
        sample = next(value for value in args if hasattr(value, "metrics"))
        kept.append(
            {key: float(value) for key, value in sample.metrics.items() if isinstance(value, (int, float, Tensor))}
        )

    setattr(recipe, name, logged)


def reference(coef: float) -> tuple[Tensor, list[tuple[float, float]]]:
    """Parameters after gradient descent in fp64 on CE + λ(log Z)² over all labels; (CE, Z) before each step and at the end."""
    model = small().double()
    rows = build_unpacked_dataset(**DATA)
    parts = []
    for step in range(STEPS + 1):
        ce = z = torch.zeros(())
        for row in rows:
            logits = model(torch.tensor([row["input_ids"]])).logits[0]
            ce = ce + F.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum")
            z = z + coef * logits.logsumexp(-1).square().sum()
        tokens = sum(len(row["labels"]) for row in rows)
        parts.append((float(ce / tokens), float(z / tokens)))
        if step < STEPS:
            model.zero_grad()
            ((ce + z) / tokens).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
    return flat(model), parts


@pytest.mark.parametrize("case", CASES)
def test_parameters_after_four_steps_equal_fp64_descent_and_ce_and_z_are_logged_apart(case: str) -> None:
    """Validation returns CE. Errors are relative to how far the parameters moved."""
    got = in_recipe(*CASES[case])
    wanted, parts = reference(COEF)
    moved = (wanted - flat(small())).norm()
    difference = torch.tensor(got["parameters"], dtype=torch.float64) - wanted
    without = (reference(0.0)[0] - wanted).norm() / moved
    assert [(log["zloss/ce"], log["zloss/z"]) for log in got["train"]] == [
        pytest.approx(p, rel=1e-5) for p in parts[:-1]
    ]
    assert got["train"][0]["loss"] == pytest.approx(sum(parts[0]), rel=1e-5)
    assert got["val"][-1]["val_loss"] == pytest.approx(parts[-1][0], rel=1e-4)
    check_and_record(f"ZLossRecipe, {STEPS} steps, {case}", float(difference.norm() / moved), float(without))


def test_depths_of_multi_token_prediction_train_and_log_no_z() -> None:
    """A depth whose hidden states are those of the main head: Z is trained and logged once, CE of the depth is trained."""

    def run() -> dict[str, Any]:
        torch.cuda.reset_peak_memory_stats = lambda *_: None  # type: ignore[assignment]
        bare = small()

        def with_a_depth(module: Any, args: Any, out: Any) -> Any:
            if out.hidden_states is not None:
                out.mtp_per_depth_h, out.mtp_loss_scaling_factor = [out.hidden_states[-1]], 0.3
            return out

        bare.register_forward_hook(with_a_depth)
        train_ft.build_model = lambda *_, **__: bare
        recipe = ZLossRecipe(settings(4, "none"))
        recipe.setup()
        logs: list[Any] = []
        _keep(recipe, "log_train_metrics", logs)
        recipe.run_train_validation_loop()
        return logs[0]  # type: ignore[no-any-return]

    got = on_ranks(1, run)
    model, depth, tokens = small().double(), 0.0, 0
    for row in build_unpacked_dataset(**DATA):
        logits, labels = model(torch.tensor([row["input_ids"]])).logits[0], torch.tensor(row["labels"])
        depth += float(F.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        tokens += len(labels)
    ce, z = reference(COEF)[1][0]
    assert (got["zloss/ce"], got["zloss/z"]) == pytest.approx((ce, z), rel=1e-5)
    assert got["loss"] == pytest.approx(ce + z + 0.3 * depth / tokens, rel=1e-5)


def test_a_loss_that_the_recipe_replaced_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoModel only warns where a model has no `logits_to_keep`, and trains without Z."""
    monkeypatch.setattr(train_ft.TrainFinetuneRecipeForNextTokenPrediction, "setup", lambda self: None)
    recipe = ZLossRecipe.__new__(ZLossRecipe)
    recipe.__dict__["loss_fn"] = torch.nn.CrossEntropyLoss()
    with pytest.raises(UnsupportedModelError, match="replaced the loss with CrossEntropyLoss, so Z would be left out"):
        recipe.setup()


def test_weights_ignored_labels_and_an_empty_batch() -> None:
    loss_fn = build_loss_module(ZLossCrossEntropy, coef=COEF, target=None, objective="centered", ignore_index=-1)
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=g, dtype=torch.float64).requires_grad_()
    weight = torch.randn(11, 8, generator=g, dtype=torch.float64)
    labels = torch.randint(11, (2, 5), generator=g)
    labels[0, :2] = -100
    weights = torch.rand(2, 5, generator=g, dtype=torch.float64)

    def call(labels: Tensor) -> Tensor:
        given = {
            "hidden_states": hidden,
            "lm_weight": weight,
            "model": None,
            "num_label_tokens": int((labels >= 0).sum()),
        }
        return calculate_loss(loss_fn, labels=labels, loss_weights=weights, **given)  # type: ignore[no-any-return]

    logits = hidden @ weight.T
    log_z = (logits - logits.mean(-1, keepdim=True)).logsumexp(-1)
    per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").reshape(2, 5)
    per_token = per_token + COEF * (log_z - torch.tensor(11.0, dtype=torch.float64).log()).square()
    wanted = (per_token * weights)[labels != -100].sum() / 8
    seen: list[Any] = []
    loss_fn.observers.append(seen.append)
    torch.testing.assert_close(call(labels), wanted)
    unweighted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(seen[0].loss_sums[1], unweighted.detach())
    found = torch.autograd.grad(call(labels), hidden)[0]
    torch.testing.assert_close(found, torch.autograd.grad(wanted, hidden)[0])
    empty = call(torch.full_like(labels, -100))
    empty.backward()
    assert float(empty) == 0.0
    assert not hidden.grad.any()  # type: ignore[union-attr]


def test_a_missing_target_and_bad_values_are_refused() -> None:
    with pytest.raises(TypeError, match="target"):
        build_loss_module(ZLossCrossEntropy, coef=COEF)
    with pytest.raises(InputError, match="unknown objective: 'centred'"):
        build_loss_module(ZLossCrossEntropy, coef=COEF, target=0.0, objective="centred")
    with pytest.raises(CoefficientError, match="negative"):
        build_loss_module(ZLossCrossEntropy, coef=-1.0, target=0.0)


def test_the_example_of_the_page_names_the_loss_and_the_recipe() -> None:
    (section,) = re.findall(r"```yaml\n(.*?)```", Path("docs/nemo.md").read_text(encoding="utf-8"), re.DOTALL)
    given = yaml.safe_load(section)
    assert ConfigNode({"loss_fn": given["loss_fn"]}).loss_fn.instantiate().objective == zloss.StandardZLoss(
        1e-4, target=0.0
    )
    assert resolve_recipe_cls(given["recipe"]) is ZLossRecipe
