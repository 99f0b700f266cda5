"""Losses written in JAX get the answers of their torch twins: the objectives of the paper, and planted bugs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import zloss
from tests.audit.loss import faulty
from tests.audit.loss.zoo import IGNORE
from tests.audit.loss.zoo import LAMBDA as COEF
from tests.integrations.framework_table import check_and_record
from zloss.audit.loss import checks
from zloss.audit.loss.audit import audit_loss
from zloss.audit.loss.probes import Space, draw, seeded

jax = pytest.importorskip("jax", reason="JAX is not installed: `make frameworks` installs it")
jnp = jax.numpy
BETA = 1e-2


def mean_valid(x: Any, target: Any) -> Any:
    valid = target != IGNORE
    return jnp.where(valid, x, 0).sum() / jnp.maximum(valid.sum(), 1)


def cross_entropy(logits: Any, target: Any) -> Any:
    picked = jnp.take_along_axis(logits, jnp.maximum(target, 0)[:, None], axis=-1)[:, 0]
    return mean_valid(jax.nn.logsumexp(logits, axis=-1) - picked, target)


def z_part(logits: Any, target: Any, coef: float = COEF, c: Any = 0.0) -> Any:
    return coef * mean_valid((jax.nn.logsumexp(logits, axis=-1) - c) ** 2, target)


def log_v(logits: Any) -> Any:
    return jnp.log(float(logits.shape[-1]))


def centered(logits: Any) -> Any:
    return logits - logits.mean(-1, keepdims=True)


def correct(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + z_part(logits, target)


def standard(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + z_part(logits, target, c=log_v(logits))


def centered_z(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + z_part(centered(logits), target, c=log_v(logits))


def factorized(logits: Any, target: Any) -> Any:
    shift = 2 * COEF * mean_valid(logits.mean(-1) ** 2, target)
    return cross_entropy(logits, target) + shift + z_part(centered(logits), target, c=log_v(logits))


def gain_aware(hidden: Any, weight: Any, target: Any) -> Any:
    logits = hidden @ weight.T
    p = jax.nn.softmax(logits, axis=-1)
    gain = jax.lax.stop_gradient(((p @ weight) ** 2).sum(-1) / (p**2).sum(-1))
    penalty = (jax.nn.logsumexp(logits, axis=-1) - log_v(logits)) ** 2 / (1 + BETA * gain)
    return cross_entropy(logits, target) + COEF * mean_valid(penalty, target)


def twin(objective: Any, *, linear: bool = False) -> Any:
    function = zloss.head_loss if linear else zloss.logits_loss
    return lambda *inputs: function(*inputs, objective, backend="dense").loss


LINEAR = {"linear": True}
OBJECTIVES = {
    "cross-entropy": (cross_entropy, twin(zloss.CrossEntropy()), {}),
    "standard": (standard, twin(zloss.StandardZLoss(COEF)), {}),
    "standard, c = 0": (correct, twin(zloss.StandardZLoss(COEF, 0.0)), {}),
    "centered": (centered_z, twin(zloss.CenteredZLoss(COEF)), {}),
    "factorized": (factorized, twin(zloss.FactorizedZLoss(2 * COEF, COEF)), {}),
    "gain-aware": (gain_aware, twin(zloss.GainAwareZLoss(COEF, BETA), linear=True), LINEAR),
}


def max_never_restored(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + z_part(logits - logits.max(-1, keepdims=True), target)


def z_added_again(logits: Any, target: Any) -> Any:
    return correct(logits, target) + z_part(logits, target)


def z_over_all_tokens(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + COEF * (jax.nn.logsumexp(logits, axis=-1) ** 2).mean()


def stopped_z(logits: Any, target: Any) -> Any:
    return cross_entropy(logits, target) + jax.lax.stop_gradient(z_part(logits, target))


def bf16_logits(logits: Any, target: Any) -> Any:
    return correct(logits.astype(jnp.bfloat16).astype(jnp.float32), target)


@jax.custom_vjp
def upstream_ignored(logits: Any, target: Any) -> Any:
    return correct(logits, target)


upstream_ignored.defvjp(
    lambda logits, target: jax.value_and_grad(correct)(logits, target), lambda gradient, _upstream: (gradient, None)
)


EXPECT = {"expect": faulty.EXPECT}
BUGS = {
    "max never restored": (max_never_restored, faulty.max_never_restored, {}, "max_shifted"),
    "Z added twice": (z_added_again, faulty.z_added_again, EXPECT, "counted_twice"),
    "Z over all tokens": (z_over_all_tokens, faulty.z_over_all_tokens, {}, "denominator_mismatch"),
    "Z without a gradient": (stopped_z, faulty.detached_z, {}, "zero_gradient_z"),
    "bf16 logits": (bf16_logits, faulty.bf16_logits, {}, "low_precision_source"),
    "upstream ignored": (upstream_ignored, faulty.upstream_ignored, {}, "upstream_ignored"),
}


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX compiles for every size."""
    monkeypatch.setattr(checks, "PRIMES", (131,))
    monkeypatch.setattr(checks, "VOCABS", (5003,))


def same_answer(of_jax: Any, of_torch: Any) -> None:
    one, other = of_jax.identified, of_torch.identified
    names = ("has_z", "coordinate", "penalty", "target_rule", "ce_denominator", "z_denominator", "computes_in")
    assert {key: getattr(one, key) for key in names} == {key: getattr(other, key) for key in names}
    assert (one.coef is None, one.target is None) == (other.coef is None, other.target is None)
    for key in ("coef", "target", "ce_scale", "extra"):
        assert getattr(one, key) is None or getattr(one, key) == pytest.approx(
            getattr(other, key), rel=1e-5, abs=1e-6
        ), key
    assert {f.id: f.verdict for f in of_jax.findings} == {f.id: f.verdict for f in of_torch.findings}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_of_the_paper_gets_the_answer_of_its_torch_twin(name: str) -> None:
    loss, other, options = OBJECTIVES[name]
    audit = audit_loss(jax.jit(loss), jax=True, **options)
    assert audit.errors == ()
    assert audit.provenance["jax"] == jax.__version__
    same_answer(audit, audit_loss(other, **options))


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_gets_the_answer_of_its_torch_twin(name: str) -> None:
    loss, other, options, id = BUGS[name]
    audit = audit_loss(jax.jit(loss), jax=True, **options)
    assert id in {finding.id for finding in audit.errors}
    same_answer(audit, audit_loss(other, **options))


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "cross-entropy"])
def test_the_bridge_gives_the_gradient_of_the_torch_twin(name: str) -> None:
    from zloss.audit.loss.jax_loss import from_jax

    loss, other, options = OBJECTIVES[name]
    probe = draw("continuous", Space(), seed=0)
    generator = seeded(1)
    head = [torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in (64, 96)]
    given = head if options else [probe.logits_TV]
    plain = twin(zloss.CrossEntropy(), linear=bool(options))

    def gradient(of: Any) -> torch.Tensor:
        leaves = [x.clone().requires_grad_() for x in given]
        return torch.cat([g.flatten() for g in torch.autograd.grad(of(*leaves, probe.target_T), leaves)])

    wanted = gradient(other)
    error, without_z = (float((gradient(of) - wanted).norm() / wanted.norm()) for of in (from_jax(loss), plain))
    check_and_record(f"audit-loss, gradient of {name}", error, without_z, tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_arrays_have_the_dtype_of_the_tensors_and_fp64_stays_local(dtype: torch.dtype) -> None:
    from zloss.audit.loss.jax_loss import from_jax

    seen = []

    def loss(logits: Any, target: Any) -> Any:
        seen.extend([str(logits.dtype), str(target.dtype), str(jnp.zeros(1).dtype)])
        return correct(logits, target), 7, {"tokens": (target != IGNORE).sum()}

    logits = torch.randn(4, 5, dtype=dtype, requires_grad=True)
    value, seven, rest = from_jax(loss)(logits, torch.tensor([0, 1, IGNORE, 3]))
    value.backward()
    name = str(dtype).removeprefix("torch.")
    assert seen == [name, "int32", "float64" if dtype == torch.float64 else "float32"]
    assert str(jnp.zeros(1).dtype) == "float32"
    assert (value.dtype, seven, int(rest["tokens"])) == (dtype, 7, 3)
    assert not rest["tokens"].requires_grad
    assert logits.grad is not None
    assert bool(logits.grad[[0, 1, 3]].any())
    assert not bool(logits.grad[2].any())


def test_the_command_audits_a_file_of_a_jax_loss(tmp_path: Any) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "import jax, jax.numpy as jnp\n"
        "@jax.jit\n"
        "def loss(logits, target):\n"
        "    log_z = jax.nn.logsumexp(logits, axis=-1)\n"
        "    ce = log_z - jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]\n"
        "    return ce.mean() + 1e-3 * (log_z**2).mean()\n"
    )
    words = [sys.executable, "-m", "zloss", "audit-loss", "--jax", f"{file}:loss", "--coef", "1e-3", "--target", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "c is" in done.stdout
