"""`apply` on a model of transformers: the training loss is ours, everything else is as it was."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors

import zloss
from tests.integrations.transformers.small_models import (
    GPT2,
    LLAMA,
    OBJECTIVE,
    assert_equals_truth,
    batch,
    loss_and_gradients,
    small,
    truth,
)
from zloss.errors import CoefficientError, InputError, UnknownNameError, UnsupportedModelError
from zloss.integrations.transformers import apply
from zloss.integrations.transformers.lazy_logits import LazyLogits


@pytest.mark.parametrize("objective", [zloss.CrossEntropy(), zloss.StandardZLoss(0.0), zloss.CenteredZLoss(None)])
def test_without_z_the_loss_is_that_of_the_untouched_model(objective: zloss.Objective) -> None:
    model = small()
    own, wanted = loss_and_gradients(model, batch())
    with apply(model, objective):
        loss, gradients = loss_and_gradients(model, batch())
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=1e-7)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [{}, {"num_items_in_batch": torch.tensor(7)}])
def test_all_labels_ignored_give_zero_with_and_without_the_trainers_count(count: dict[str, Any]) -> None:
    model = small()
    with apply(model, OBJECTIVE):
        loss = model(**batch() | {"labels": torch.full((2, 16), -100)} | count).loss
        loss.backward()
    assert float(loss.detach()) == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_handle_has_the_parts_of_the_last_step_without_their_graph() -> None:
    model = small()
    with apply(model, OBJECTIVE) as handle:
        assert handle.last is None
        loss = model(**batch()).loss
        assert handle.calls == 1
        assert float(handle.last.cross_entropy + handle.last.auxiliary) == pytest.approx(loss.item(), rel=1e-6)
        assert float(handle.last.loss) == pytest.approx(loss.item(), rel=1e-6)
        assert float(handle.last.auxiliary) > 1e-3
        assert handle.last.stats.summary()["tokens"] == 27  # 30 predictions, 3 of them ignored
        kept = [handle.last.loss, handle.last.cross_entropy, handle.last.stats.log_z]
        assert not any(tensor.requires_grad for tensor in kept)


def test_label_smoothing_is_that_of_pytorch() -> None:
    model = small()
    logits, labels = model(**batch()).logits, batch()["labels"]
    wanted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    with apply(model, zloss.CrossEntropy(), label_smoothing=0.1):
        torch.testing.assert_close(model(**batch()).loss, wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises((InputError, CoefficientError)):
        apply(model, zloss.CrossEntropy(), label_smoothing=2.0)


def test_evaluation_and_generation_are_unchanged() -> None:
    model = small().eval()
    with torch.no_grad():
        own = model(**batch())
        words = model.generate(batch()["input_ids"], max_new_tokens=4, do_sample=False)
    with apply(model, OBJECTIVE) as handle, torch.no_grad():
        got = model(**batch())
        assert torch.equal(got.loss, own.loss)
        assert torch.equal(got.logits, own.logits)
        assert torch.equal(model.generate(batch()["input_ids"], max_new_tokens=4, do_sample=False), words)
        model.train()  # without gradient nothing trains, whatever the mode
        assert torch.equal(model(**batch()).logits, own.logits)
        assert handle.calls == 0


def test_remove_leaves_no_trace() -> None:
    model = small()
    before = {name: (set(vars(module)), module.forward) for name, module in model.named_modules()}
    handle = apply(model, OBJECTIVE)
    model(**batch()).loss.backward()
    handle.remove()
    assert {name: (set(vars(module)), module.forward) for name, module in model.named_modules()} == before
    for kind in ("pre_hooks", "hooks", "hooks_with_kwargs", "hooks_always_called"):
        assert not getattr(model, f"_forward_{kind}")
    assert model(**batch()).logits.shape == (2, 16, 131)


def test_a_forward_that_raises_restores_the_head() -> None:
    model = small()
    with apply(model, OBJECTIVE):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[10_000]]), labels=torch.tensor([[1]]))
        assert "forward" not in vars(model.lm_head)
        assert_equals_truth(model, batch(), truth(small(), batch()))


def test_copies_and_pickles_train_alike_with_separate_handles() -> None:
    model = small()
    wanted = truth(model, batch())
    handle = apply(model, OBJECTIVE)
    assert_equals_truth(model, batch(), wanted)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert_equals_truth(twin, batch(), wanted)
    assert handle.calls == 1


def test_checkpoints_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model = small()
    names = list(model.state_dict())
    with apply(model, OBJECTIVE):
        model(**batch()).loss.backward()
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_loss_that_does_not_go_through_the_model_raises() -> None:
    model = small().eval()
    with apply(model, OBJECTIVE):
        loss = model(**batch()).loss
        with pytest.raises(UnsupportedModelError, match="evaluation mode"):
            loss.backward()
        logits = model.train()(input_ids=batch()["input_ids"]).logits
        with pytest.raises(UnsupportedModelError, match="label smoother"):
            logits.logsumexp(-1).mean().backward()


@pytest.mark.parametrize(
    ("loss_function", "words"),
    [
        (lambda logits, labels, **_: logits.softmax(-1).sum(), r"LlamaForCausalLM applies `\.softmax`"),
        (lambda logits, labels, **_: torch.zeros((), requires_grad=True), "without its output head or without"),
    ],
)
def test_an_unknown_operation_and_a_loss_past_the_cross_entropy_raise(loss_function: Any, words: str) -> None:
    model = small()
    model.loss_function = loss_function
    with apply(model, OBJECTIVE), pytest.raises(UnsupportedModelError, match=words):
        model(**batch())


def test_labels_may_be_positional_and_a_tuple_is_returned_where_one_is_requested() -> None:
    model, inputs = small(), batch()
    wanted, _ = truth(model, inputs)
    with apply(model, OBJECTIVE):
        by_place = model(inputs["input_ids"], None, None, None, None, inputs["labels"]).loss
        output = model(**inputs, return_dict=False)
    assert isinstance(output, tuple)
    for loss in (by_place, output[0]):
        torch.testing.assert_close(loss.detach(), wanted, rtol=1e-5, atol=1e-6)


MASK, BIAS = torch.tensor([[True, False, True], [False, True, True]]), torch.linspace(-1, 1, 7)
DONE: dict[str, Callable[[Any], Any]] = {
    "a shift": lambda z: z[..., :-1, :].contiguous(),
    "a shift without the last axis": lambda z: z[:, 1:],
    "a mask of tokens": lambda z: z[MASK],
    "a new axis": lambda z: z[:, None],
    "a cut of the vocabulary": lambda z: z[..., :5],
    "flat tokens": lambda z: z.float().view(-1, 7),
    "flat tokens, the vocabulary inferred": lambda z: z.reshape(6, -1),
    "layouts": lambda z: z.flatten(0, 1).unsqueeze(0).squeeze(0),
    "a scale": lambda z: 0.5 * (z / 4).mul(3.0),
    "a softcap": lambda z: 30.0 * torch.tanh(2 * z / 30.0),
    "a bias": lambda z: (2 * z + BIAS.view(1, -1)) * 0.5,
}


@pytest.mark.parametrize("name", DONE)
def test_what_is_done_to_lazy_logits_is_done_to_the_logits(name: str) -> None:
    hidden, weight = torch.randn(2, 3, 5), torch.randn(7, 5)
    lazy = DONE[name](LazyLogits(types.SimpleNamespace(model_name="M"), hidden, torch.float32, 7))  # type: ignore[arg-type]
    real = DONE[name](hidden @ weight.T)
    z = lazy.scale * (lazy.hidden @ weight[: lazy.vocab].T + (0 if lazy.bias_V is None else lazy.bias_V))
    z = z if lazy.softcap is None else lazy.softcap * torch.tanh(z / lazy.softcap)
    assert lazy.shape == lazy.size() == real.shape
    assert (lazy.ndim, lazy.numel()) == (real.ndim, real.numel())
    torch.testing.assert_close(z, real)


@pytest.mark.parametrize(
    "use",
    [
        *(lambda z: z[..., 1:], lambda z: z[..., 0], lambda z: z.view(-1), lambda z: z.unsqueeze(-1), lambda z: z * z),
        *(lambda z: z.to(torch.bfloat16), lambda z: z + 1.0, lambda z: torch.tanh(torch.tanh(z)), lambda z: z.argmax()),
        lambda z: z.view(torch.int32),
    ],
)
def test_what_would_need_the_logits_is_refused(use: Callable[[Any], Any]) -> None:
    lazy = LazyLogits(types.SimpleNamespace(model_name="M"), torch.randn(2, 3, 5), torch.float32, 7)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="M applies"):
        use(lazy)


LOGIT_USES: dict[str, Callable[[Any], Any]] = {
    "an index": lambda logits: logits[:, -1],
    "a method": lambda logits: logits.argmax(-1),
    "a shape": lambda logits: logits.shape,
    "a function of torch": lambda logits: torch.softmax(logits, -1),
    "a list of tensors": lambda logits: torch.stack([logits, logits]),
    "a loss": lambda logits: nn.functional.cross_entropy(logits, torch.tensor([1])),
    "an operator": lambda logits: 2 * logits,
    "a comparison": lambda logits: logits > 0,
    "a length": len,
    "numpy": np.asarray,
}


@pytest.mark.parametrize("use", LOGIT_USES)
@pytest.mark.parametrize("return_dict", [True, False])
def test_logits_of_a_training_call_were_none_and_their_use_a_bare_type_error(use: str, return_dict: bool) -> None:
    model = small()
    with apply(model, OBJECTIVE):
        output = model(**batch(), return_dict=return_dict)
    logits = output.logits if return_dict else output[1]
    with pytest.raises(
        UnsupportedModelError, match=r"the output of LlamaForCausalLM has no logits: .* evaluation mode"
    ):
        LOGIT_USES[use](logits)


def test_an_output_without_logits_may_be_passed_on() -> None:
    """Wrappers and loops traverse, convert, move, gather and copy what a model returns."""
    model = small()
    with apply(model, OBJECTIVE):
        output = model(**batch(), output_hidden_states=True, use_cache=False)
    assert list(output) == ["loss", "logits", "hidden_states"]
    assert not hasattr(output.logits, "dtype")
    for copied in (
        copy.copy(output.logits),
        copy.deepcopy(output.logits),
        pickle.loads(pickle.dumps(output.logits)),
        accelerate.utils.convert_to_fp32(output).logits,
        accelerate.utils.send_to_device(output, "cpu").logits,
        accelerate.utils.gather(accelerate.utils.recursively_apply(torch.detach, output)).logits,
    ):
        assert "NoLogits" in repr(copied)
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    assert len(tensors) == len(list(_find_tensors(output))) == 1 + len(output.hidden_states)
    output.loss.backward()


def test_resized_embeddings_after_apply() -> None:
    model, plain = small(), small()
    with apply(model, OBJECTIVE):
        for each in (model, plain):
            torch.manual_seed(3)
            each.resize_token_embeddings(150)
        inputs = batch()
        inputs["input_ids"][0, 0] = 149
        assert_equals_truth(model, inputs, truth(plain, inputs))


@pytest.mark.parametrize("name", [LLAMA, GPT2])
def test_gradient_checkpointing(name: str) -> None:
    model = small(name)
    wanted = truth(model, batch())
    model.gradient_checkpointing_enable()
    with apply(model, OBJECTIVE):
        assert_equals_truth(model, batch(), wanted)


def test_bf16_autocast_rounds_operands_not_logits() -> None:
    model = small()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = truth(model, batch())
        with apply(model, OBJECTIVE):
            loss = model(**batch()).loss
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(wanted[0]), rel=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["apply first", "compile first"])
def test_compiled(order: str) -> None:
    model = small()
    model.model.layers = model.model.layers[:1]
    wanted = truth(model, batch())
    if order == "apply first":
        handle = apply(model, OBJECTIVE)
        compiled = torch.compile(model, backend="eager")
    else:
        compiled = torch.compile(model, backend="eager")
        handle = apply(compiled, OBJECTIVE)
    with handle:
        assert_equals_truth(compiled, batch(), wanted)
    assert handle.calls == 1


def test_what_cannot_be_taken_over_is_refused() -> None:
    for model, words in ((nn.Linear(3, 4), "head_loss"), (nn.DataParallel(small()), "DistributedDataParallel")):
        with pytest.raises(UnsupportedModelError, match=words):
            apply(model, OBJECTIVE)
    with pytest.raises(UnknownNameError, match="backend"):  # it was refused in the first step only
        apply(small(), OBJECTIVE, backend="tritn")  # type: ignore[arg-type]
    with pytest.raises(CoefficientError, match=r"function of the optimizer step.* 0-d tensor .*`attach`"):
        apply(small(), zloss.CenteredZLoss(lambda step: 1e-4))
    model = small()
    with apply(model, OBJECTIVE), pytest.raises(InputError, match="already"):
        apply(model, OBJECTIVE)
    apply(model, OBJECTIVE).remove()


def test_ligers_fused_cross_entropy_is_refused() -> None:
    liger = pytest.importorskip("liger_kernel.transformers.model.llama", exc_type=ImportError)
    model = small()
    model.forward = types.MethodType(liger.lce_forward, model)
    with pytest.raises(UnsupportedModelError, match="Liger"):
        apply(model, OBJECTIVE)
