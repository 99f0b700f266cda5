"""ZLossPlugin in axolotl's own plugin manager, configuration and trainer, against fp64 gradient descent on whole logits."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import torch.nn.functional as F
import transformers
import yaml
from torch import Tensor

from tests.integrations.framework_table import check_and_record
from tests.integrations.ranks import on_ranks
from tests.integrations.transformers.small_models import LLAMA, VOCAB, small
from tests.integrations.transformers.trainers import arguments, padded, train
from zloss.errors import OutdatedDependencyError, ZlossError

pytest.importorskip("axolotl", reason="axolotl is not installed: python -m tools.frameworks axolotl")
pytest.importorskip("numba", reason="axolotl's trainer imports numba: python -m tools.frameworks axolotl")
import axolotl.utils.distributed
from axolotl.core.trainers.base import AxolotlTrainer
from axolotl.core.training_args_base import AxolotlTrainingMixins
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault

NAME = "zloss.integrations.axolotl.ZLossPlugin"
MOE = "OlmoeForCausalLM"
SEQUENCES, LENGTH, STEPS, RATE = 8, 12, 4, 0.1
HEAD = {"objective": "standard", "coef": "1e-1", "target": 0.0}  # as YAML reads 1e-1
ROUTER = {"coef": 10.0, "target": "log_experts"}
SPLITS = {
    # name: processes, micro-batches
    "1 process": (1, 1),
    "4 micro-batches": (1, 4),
    "2 processes, 2 micro-batches": (2, 2),
}


@dataclass
class TrainingArguments(AxolotlTrainingMixins, transformers.TrainingArguments):  # type: ignore[misc]
    """axolotl's own class of this definition is in a module that imports a part of TRL which TRL no longer has."""


def configured(section: Any, **others: Any) -> Any:
    """The plugin of a configuration that axolotl has read, and the configuration."""
    least = {"base_model": "tiny", "datasets": [{"path": "rows", "type": "alpaca"}], "micro_batch_size": 1}
    least |= {"learning_rate": RATE, "gradient_accumulation_steps": 1, "plugins": [NAME]}
    cfg = DictDefault(least | others | {"zloss": section})
    prepare_plugins(cfg)
    return PluginManager.get_instance(), validate_config(cfg)


def rows() -> Any:
    ids = torch.randint(3, VOCAB, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    return datasets.Dataset.from_dict({"x": ids.tolist()}).with_format("torch")


def make_trainer(model: Any, micro_batches: int = 1, processes: int = 1, **settings: Any) -> Any:
    """A step is one pass over all sequences, so that their order does not matter."""
    size = SEQUENCES // (micro_batches * processes)
    sgd = {
        "optim": "sgd",
        "learning_rate": RATE,
        "max_grad_norm": 0,
        "remove_unused_columns": False,
        "max_steps": STEPS,
    }
    options = arguments(
        TrainingArguments,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=micro_batches,
        ddp_backend="gloo" if processes > 1 else None,
        **sgd | settings,
    )
    return AxolotlTrainer(
        model=model, args=options, data_collator=padded, eval_data_collator=padded, train_dataset=rows()
    )


def flat(model: Any) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def reference(name: str, coef: float, router_coef: float = 0.0) -> Tensor:
    """The parameters after gradient descent in fp64 on CE + λ(log Z)² + λ_R (log Z_R − log E)² of all sequences."""
    model = small(name).double()
    model.set_experts_implementation("eager")  # the others have no fp64
    inputs = padded(list(rows()))
    target = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    for _ in range(STEPS):
        out = (
            model(input_ids=inputs["input_ids"], output_router_logits=True)
            if name == MOE
            else model(inputs["input_ids"])
        )
        log_z = out.logits.logsumexp(-1)[target != -100]
        loss = F.cross_entropy(out.logits.flatten(0, 1), target.flatten()) + coef * log_z.square().mean()
        if name == MOE:
            logits = torch.stack(list(out.router_logits))
            loss = loss + router_coef * (logits.logsumexp(-1) - math.log(logits.shape[-1])).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
    return flat(model)


def trained(name: str, section: dict[str, Any], processes: int, micro_batches: int) -> Tensor:
    def run() -> list[float]:
        if processes > 1:
            axolotl.utils.distributed.distributed_state = None  # the parent's
            os.environ["ACCELERATE_USE_CPU"] = "true"  # axolotl forgets `use_cpu` of the arguments
        model = small(name)
        manager, cfg = configured(section)
        trainer = make_trainer(model, micro_batches, processes)
        manager.post_trainer_create(cfg, trainer)
        train(trainer)
        return flat(model).tolist()

    return torch.tensor(run() if processes == 1 else on_ranks(processes, run), dtype=torch.float64)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", [LLAMA, MOE])
def test_parameters_after_four_steps_equal_fp64_descent(name: str, split: str) -> None:
    """Relative to how far they moved; without the term in question they would move elsewhere."""
    section = HEAD | ({"router": ROUTER} if name == MOE else {})
    got = trained(name, section, *SPLITS[split])
    wanted = reference(name, 0.1, 10.0)
    without = reference(name, 0.1, 0.0) if name == MOE else reference(name, 0.0)
    moved = (wanted - flat(small(name))).norm()
    term = "head and router Z" if name == MOE else "head Z"
    check_and_record(
        f"ZLossPlugin, {STEPS} steps of AxolotlTrainer, {term}, {split}",
        float((got - wanted).norm() / moved),
        float((without - wanted).norm() / moved),
    )


def test_ce_and_z_are_logged_apart_and_evaluation_returns_ce() -> None:
    model = small()
    manager, cfg = configured(HEAD | {"scalars": "main"})
    trainer = make_trainer(model, max_steps=1, eval_strategy="no")
    trainer.eval_dataset = rows()
    manager.post_trainer_create(cfg, trainer)
    before = trainer.evaluate(rows())["eval_loss"]
    (log,) = train(trainer)
    assert log["zloss/ce"] == pytest.approx(before, rel=1e-5)
    assert log["zloss/ce"] + log["zloss/z"] == pytest.approx(log["loss"], rel=1e-4)
    assert log["zloss/z"] > 0.1
    assert manager.plugins[NAME].attachment.handle.calls == 1


def test_log_vocab_is_a_target_of_log_v_and_ce_alone_only_logs() -> None:
    from zloss.integrations.axolotl import attach_arguments

    _, cfg = configured({"objective": "factorized", "coef": 1e-4, "target": "log_vocab", "on_alert": "raise"})
    found = attach_arguments(cfg)
    assert (found["objective"].relative_target, found["objective"].relative_coef) == (None, 1e-4)
    assert found["on_alert"] == "raise"
    _, cfg = configured({"objective": "ce", "label_smoothing": 0.1})
    assert not attach_arguments(cfg)["objective"].active
    assert attach_arguments(cfg)["label_smoothing"] == 0.1


def test_a_plugin_of_an_earlier_configuration_leaves_the_next_one_alone() -> None:
    manager, _ = configured(HEAD)
    other = DictDefault(base_model="tiny", plugins=[])
    manager.plugins[NAME].register(other)
    trainer = make_trainer(small())
    manager.post_trainer_create(other, trainer)
    assert "log" not in vars(trainer)


@pytest.mark.parametrize(
    ("section", "others", "sentence"),
    [
        (None, {}, "needs a section `zloss:` in the axolotl configuration"),
        ("standard", {}, "needs a section `zloss:`"),
        (HEAD | {"coeff": 1e-4}, {}, "unknown key of `zloss:`: 'coeff'. Did you mean 'coef'?"),
        ({"coef": 1e-4, "target": 0.0}, {}, "unknown objective: None."),
        (HEAD | {"objective": "centred"}, {}, "unknown objective: 'centred'. Did you mean 'centered'?"),
        (HEAD | {"coef": None}, {}, "`zloss.coef` is expected to be a number, but is missing."),
        (HEAD | {"coef": True}, {}, "`zloss.coef` is expected to be a number, but got True."),
        (HEAD | {"coef": -1.0}, {}, "but got -1.0: a negative penalty"),
        (
            {"objective": "standard", "coef": 1e-4},
            {},
            "`zloss.target` is expected to be a number (0.0 in most codebases) or",
        ),
        (HEAD | {"target": "logv"}, {}, "or 'log_vocab', but got 'logv'."),
        (HEAD | {"scalars": ["cee"]}, {}, "unknown scalar: 'cee'."),
        (HEAD | {"on_alert": "shout"}, {}, "`on_alert` is expected to be 'log', 'raise'"),
        (
            HEAD | {"router": 1e-3},
            {},
            "`zloss.router` is expected to be a section with `coef` and `target`, but got 0.001.",
        ),
        (HEAD | {"router": {"coef": 1e-3}}, {}, "`zloss.router.target` is expected to be a number"),
        (HEAD | {"router": ROUTER | {"coef": -1}}, {}, "`zloss.router.coef` is expected to be None (off) or"),
        (HEAD | {"router": ROUTER | {"convention": "olmo"}}, {}, "unknown router convention: 'olmo'."),
        (HEAD | {"router": ROUTER | {"topk": 2}}, {}, "unknown key of `zloss.router:`: 'topk'. Did you mean 'top_k'?"),
        (HEAD, {"zloss_coef": 1e-4}, "`zloss_coef` is not a key of axolotl"),
        (HEAD, {"chunked_cross_entropy": True}, "`chunked_cross_entropy: True` makes another function compute"),
        (HEAD, {"context_parallel_size": 2}, "got `context_parallel_size: 2`: set it to 1."),
        (HEAD, {"tensor_parallel_size": 2}, "got `tensor_parallel_size: 2`: set it to 1."),
    ],
)
def test_a_bad_configuration_gets_one_sentence_when_it_is_read(
    section: Any, others: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ZlossError, match=re.escape(sentence)) as raised:
        configured(section, **others)
    assert "\n" not in str(raised.value)


def test_an_old_axolotl_is_named_and_the_error_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """axolotl prints an ImportError of a plugin's module and trains on without it."""
    monkeypatch.setattr("zloss.integrations.axolotl.LEAST_AXOLOTL", "99.0")
    with pytest.raises(OutdatedDependencyError, match=r"needs axolotl ≥ 99.0, but axolotl 0\."):
        configured(HEAD)


def test_the_example_of_the_page_is_a_valid_configuration() -> None:
    (section,) = re.findall(r"```yaml\n(.*?)```", Path("docs/axolotl.md").read_text(encoding="utf-8"), re.DOTALL)
    given = yaml.safe_load(section)
    _, cfg = configured(given.pop("zloss"), **given)
    assert cfg.zloss == {"objective": "standard", "coef": 1e-4, "target": 0.0}
