"""TRL's SFTTrainer: with coefficient 0 its own loss, entropy and accuracy; with Z the eager loss."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zloss
from tests.integrations.transformers.small_models import OBJECTIVE, VOCAB, batch, small
from tests.integrations.transformers.trainers import arguments, train
from zloss.errors import InputError, UnsupportedModelError
from zloss.integrations.transformers import apply, attach

trl = pytest.importorskip("trl", minversion="1.16")
datasets = pytest.importorskip("datasets")


def tokenizer() -> Any:
    import tokenizers
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    own = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def texts(kind: str) -> Any:
    g = torch.Generator().manual_seed(1)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=g))
        return " ".join(f"w{i}" for i in torch.randint(3, VOCAB, (count,), generator=g).tolist())

    if kind == "completion":
        rows = [{"prompt": words(4, 5), "completion": " " + words(3, 15)} for _ in range(24)]
    else:
        rows = [{"text": words(6, 20)} for _ in range(24)]
    return datasets.Dataset.from_list(rows)


KINDS: dict[str, dict[str, Any]] = {
    "completion": {},
    "packing": {"packing": True},
    "text": {"gradient_checkpointing": True},
}


def make(kind: str, model: Any, trainer: type = trl.SFTTrainer, **settings: Any) -> Any:
    size = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "max_length": 32}
    options = size | {"bf16": False, "gradient_checkpointing": False} | KINDS[kind] | settings
    with contextlib.redirect_stdout(io.StringIO()):
        return trainer(model, arguments(trl.SFTConfig, **options), None, texts(kind), processing_class=tokenizer())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["apply first", "attach"])
def test_without_z_everything_is_trls_own(kind: str, order: str) -> None:
    model = small()
    wanted = train(make(kind, copy.deepcopy(model)))
    objective = zloss.StandardZLoss(0.0)
    if order == "attach":
        trainer = make(kind, model)
        attach(trainer, objective)
    else:
        apply(model, objective)
        trainer = make(kind, model)
    got = train(trainer)
    assert len(got) == len(wanted) == 3
    for one, other in zip(got, wanted, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
        assert one["mean_token_accuracy"] == pytest.approx(other["mean_token_accuracy"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
        if order == "attach":
            assert one["zloss/z"] == 0


class EagerSFT(trl.SFTTrainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        target = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        if "shift_labels" in inputs:
            target = inputs["shift_labels"]
        own = {name: value for name, value in inputs.items() if name not in ("labels", "shift_labels")}
        logits = model(**own, use_cache=False).logits.float()
        ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return (ce + (1e-2 * logits.logsumexp(-1).square())[target != -100].sum()) / num_items_in_batch


@pytest.mark.parametrize("kind", ["completion", "packing"])
def test_with_z_the_loss_is_the_eager_one(kind: str) -> None:
    model = small()
    wanted = train(make(kind, copy.deepcopy(model), EagerSFT))
    trainer = make(kind, model)
    attach(trainer, OBJECTIVE)
    got = train(trainer)
    assert [log["loss"] for log in got] == pytest.approx([log["loss"] for log in wanted], rel=1e-5)
    assert got[0]["zloss/z"] > 1e-3


@pytest.mark.parametrize(
    ("settings", "words"), [({"loss_type": "dft"}, "dft"), ({"label_smoothing_factor": 0.1}, "label.smooth")]
)
def test_settings_that_bypass_the_loss_are_refused_by_attach_and_in_the_first_step(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        attach(make("text", small(), **settings), OBJECTIVE)
    model = small()
    apply(model, OBJECTIVE)
    with pytest.raises(UnsupportedModelError, match=words):
        train(make("text", model, **settings))


def other(name: str, model: Any, kind: type | None = None) -> Any:
    """Another trainer of TRL, one step long; GRPO and RLOO at temperature 0.7."""
    size = {"per_device_train_batch_size": 2, "max_steps": 1, "bf16": False, "gradient_checkpointing": False}
    rows: list[dict[str, Any]] = [{"prompt": "w3 w4"} for _ in range(8)]
    extra: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        size |= {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7, "beta": 0.0}
        extra["reward_funcs"] = lambda completions, **_: [float(len(set(text.split()))) for text in completions]
    else:
        answer = {"chosen": " w7", "rejected": " w9"} if name == "DPO" else {"completion": " w7"}
        rows = [row | answer | ({"label": i % 2 == 0} if name == "KTO" else {}) for i, row in enumerate(rows)]
        extra["ref_model"] = copy.deepcopy(model)
    options = arguments(getattr(trl, f"{name}Config"), **size)
    with contextlib.redirect_stdout(io.StringIO()):
        return (kind or getattr(trl, f"{name}Trainer"))(
            model=model,
            args=options,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            **extra,
        )


OTHERS = ("GRPO", "RLOO", "DPO", "KTO")


@pytest.mark.parametrize("name", OTHERS)
def test_attach_lets_another_trainer_of_trl_read_ce_plus_z_as_log_probabilities(name: str) -> None:
    trainer = other(name, small())
    with pytest.raises(UnsupportedModelError, match=rf"TRL's SFTTrainer, but got {name}Trainer: .*`compute_loss`"):
        attach(trainer, zloss.StandardZLoss(1e-12))
    assert "log" not in vars(trainer)
    attach(make("text", trainer.model), OBJECTIVE).remove()  # nothing was left on the model


@pytest.mark.parametrize("order", ["apply first", "trainer first"])
@pytest.mark.parametrize("name", OTHERS)
def test_apply_lets_another_trainer_of_trl_read_ce_plus_z_as_log_probabilities(name: str, order: str) -> None:
    """At λ = 1e-12 GRPO's log-probabilities lost their temperature, in silence; DPO and KTO met a None."""
    model = small()
    before = copy.deepcopy(model.state_dict())
    if order == "apply first":
        apply(model, zloss.StandardZLoss(1e-12))
    trainer = other(name, model)
    if order == "trainer first":
        apply(model, zloss.StandardZLoss(1e-12))
    with pytest.raises(UnsupportedModelError, match=r"other than SFTTrainer.*compute_loss"):
        train(trainer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("order", ["apply first", "attach"])
def test_a_model_that_another_trainer_of_trl_had_before_trains_in_sft_trainer(order: str) -> None:
    """With bf16 accelerate wraps the forward that TRL put on the model."""
    model = small()
    other("DPO", model)
    handle = apply(model, OBJECTIVE) if order == "apply first" else None
    trainer = make("text", model, bf16=True)
    handle = handle or attach(trainer, OBJECTIVE).handle
    assert len(train(trainer)) == 3
    assert handle.calls == 6


class MySFTTrainer(trl.SFTTrainer):
    pass


class MyGRPOTrainer(trl.GRPOTrainer):
    pass


def test_subclasses_count_as_the_trainer_of_trl_that_they_derive_from() -> None:
    from trl.experimental.gkd import GKDTrainer

    trainer = make("text", small(), MySFTTrainer)
    attachment = attach(trainer, OBJECTIVE)
    assert train(trainer)[0]["zloss/z"] > 1e-3
    attachment.remove()
    trainer.__class__ = type("MyGKDTrainer", (GKDTrainer,), {})
    with pytest.raises(UnsupportedModelError, match="got MyGKDTrainer, which derives from TRL's GKDTrainer:"):
        attach(trainer, OBJECTIVE)
    with pytest.raises(UnsupportedModelError, match="got MyGRPOTrainer, which derives from TRL's GRPOTrainer:"):
        attach(other("GRPO", small(), MyGRPOTrainer), OBJECTIVE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_fused_head_loses_its_temperature(temperature: float) -> None:
    from trl.trainer.utils import add_fused_lm_head

    model = small()
    add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy", "is_top1"))
    apply(model, OBJECTIVE)
    expected = (
        contextlib.nullcontext()
        if temperature == 1
        else pytest.raises(UnsupportedModelError, match=f"at temperature {temperature}")
    )
    with expected:
        assert model(**batch(), fused_lm_head=True).log_probs.min() < 0
