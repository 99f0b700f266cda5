"""Implementations of CE + Z by name (ours, PyTorch's, those of other packages), and their gradients at several λ.

Each is one function of tensors and λ, sum-reduced so that a 1/N cannot push 16-bit gradients below their range:

    logits:  loss(logits [T, V], label [T], coef, target)
    linear:  loss(hidden [T, D], weight [V, D], label [T], coef, target)

Packages are imported when an implementation is called. Triton decides on import whether kernels are compiled or
interpreted, so without a GPU they run in a child process that lives as long as this one; tensors are passed as files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnknownNameError, ZlossError, first_line
from zloss.head.loss import head_loss, logits_loss
from zloss.head.options import ChosenBackend
from zloss.measure.bf16_products import ISA_VARIABLE, SAFE_ISA, native_bf16_products_work
from zloss.objectives import StandardZLoss

Loss = Callable[..., Tensor]
Takes = Literal["logits", "linear"]
EXTRAS = {"triton": "triton", "liger_kernel": "peers", "cut_cross_entropy": "peers"}
"""Package → the extra of zloss that installs it."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute CE + λ(log Z − c)², and what it needs to run."""

    name: str
    title: str
    takes: Takes
    loss: Loss
    package: str | None = None
    """Package that provides it; None: this package or torch."""
    has_z: bool = True
    fixed_target: float | None = None
    """The only c it supports; None: any."""
    kernel: bool = False
    """Whether it runs Triton kernels, which need a GPU or Triton's interpreter in a separate process."""
    backend: ChosenBackend | None = None
    """The backend of this package that it runs."""
    torch_function: str | None = None
    """Function of `torch.nn.functional` that it calls, if older versions of torch lack it."""

    @property
    def installed(self) -> bool:
        """Whether it can run on this machine."""
        try:
            self.require()
        except ZlossError:
            return False
        return True

    def require(self) -> None:
        """Raise an error that says what is missing."""
        for package in (self.package, "triton" if self.kernel else None):
            if package is not None and importlib.util.find_spec(package) is None:
                if package in EXTRAS:
                    raise MissingDependencyError(package, f"Auditing {self.title}", EXTRAS[package])
                raise InputError(
                    f"auditing {self.title} needs the package {package!r}, which is not installed and which no zloss extra "
                    f"installs: install it, or leave {self.name!r} out."
                )
        if self.torch_function is not None and not hasattr(F, self.torch_function):
            raise InputError(
                f"auditing {self.title} needs torch.nn.functional.{self.torch_function}, which torch {torch.__version__} does "
                f"not have: use a newer torch, or leave {self.name!r} out."
            )


def _ours(name: str, title: str, function: Callable[..., Any], backend: ChosenBackend) -> Implementation:
    """`logits_loss` or `head_loss` on one backend."""

    def loss(*arguments: Any) -> Tensor:
        *inputs, coef, target = arguments
        objective = StandardZLoss(coef, target)
        out: Tensor = function(*inputs, objective, reduction="sum", statistics="light", backend=backend).loss
        return out

    takes: Takes = "logits" if function is logits_loss else "linear"
    return Implementation(name, title, takes, loss, kernel=backend == "triton", backend=backend)


def _manual_z(logits: Tensor, coef: float, target: float) -> Tensor:
    """The penalty as it is usually written: fp32 logsumexp of the logits in the dtype they are stored in."""
    return coef * ((torch.logsumexp(logits.float(), dim=-1) - target) ** 2).sum()


def _torch_ce(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    return F.cross_entropy(logits, label, reduction="sum") + _manual_z(logits, coef, target)


def _log_softmax(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    log_p = F.log_softmax(logits.float(), dim=-1)
    return -log_p.gather(1, label.unsqueeze(1)).sum() + _manual_z(logits, coef, target)


def _torch_projection(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    return _torch_ce(F.linear(hidden, weight), label, coef, target)


def _torch_linear(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    options: Any = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256, chunking_method=None)
    out: Tensor = F.linear_cross_entropy(hidden, weight, label, reduction="sum", options=options)
    return out


def _of_package(module: str, name: str) -> Loss:
    """A function of an optional package, imported now."""
    function: Loss = getattr(importlib.import_module(module), name)
    return function


def _liger(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    cross_entropy = _of_package("liger_kernel.transformers.functional", "liger_cross_entropy")
    # It writes the gradient over its input; the copy keeps the caller's logits.
    return cross_entropy(logits.clone(), label, reduction="sum", lse_square_scale=coef)


def _liger_linear(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    fused = _of_package("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")
    return fused(hidden, weight, label, reduction="sum", lse_square_scale=coef)


def _cut(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    impl = "cce" if hidden.device.type == "cuda" else "torch_compile"
    linear_cross_entropy = _of_package("cut_cross_entropy", "linear_cross_entropy")
    return linear_cross_entropy(hidden, weight, label, reduction="sum", impl=impl)


def _flash(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
    cross_entropy_loss = _of_package("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
    return cross_entropy_loss(logits, label, lse_square_scale=coef)[0].sum()


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        _ours("dense", "zloss, dense", logits_loss, "dense"),
        _ours("chunked", "zloss, chunked", logits_loss, "chunked"),
        _ours("triton", "zloss, Triton", logits_loss, "triton"),
        Implementation("torch-ce", "F.cross_entropy + manual Z", "logits", _torch_ce),
        Implementation("log-softmax", "fp32 log_softmax CE + manual Z", "logits", _log_softmax),
        Implementation("liger", "Liger cross-entropy", "logits", _liger, "liger_kernel", True, 0.0, True),
        Implementation("flash-attn", "flash-attn cross-entropy", "logits", _flash, "flash_attn", True, 0.0, True),
        _ours("dense-linear", "zloss, dense, from hidden states", head_loss, "dense"),
        _ours("chunked-linear", "zloss, chunked, from hidden states", head_loss, "chunked"),
        _ours("triton-linear", "zloss, Triton, from hidden states", head_loss, "triton"),
        Implementation("torch-projection", "F.linear, F.cross_entropy + manual Z", "linear", _torch_projection),
        Implementation(
            "torch-linear",
            "F.linear_cross_entropy",
            "linear",
            _torch_linear,
            has_z=False,
            torch_function="linear_cross_entropy",
        ),
        Implementation(
            "liger-linear", "Liger fused linear cross-entropy", "linear", _liger_linear, "liger_kernel", True, 0.0, True
        ),
        Implementation("cut-cross-entropy", "cut-cross-entropy", "linear", _cut, "cut_cross_entropy", has_z=False),
    )
}
"""By name, in the order in which tables list them."""


def find_implementation(name: str) -> Implementation:
    """Raises an error that lists the known names if `name` is unknown."""
    if name not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]


class Evaluation(NamedTuple):
    """One call: the scalar loss, and its gradients at the inputs in the dtype the implementation returns."""

    value: float
    grads: tuple[Tensor, ...]


def evaluate(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ, wherever the implementation can run: in this process, on the GPU, or interpreted.

    Gradients come back on the device of the inputs.
    """
    implementation.require()
    if not implementation.kernel or os.environ.get("TRITON_INTERPRET") == "1":
        return call(implementation.loss, inputs, label_T, coefs, target)
    if torch.cuda.is_available():
        found = call(implementation.loss, [tensor.cuda() for tensor in inputs], label_T.cuda(), coefs, target)
        return [Evaluation(value, tuple(grad.to(inputs[0].device) for grad in grads)) for value, grads in found]
    return _in_child(implementation, inputs, label_T, coefs, target)


def call(
    loss_of: Loss, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ in this process; the inputs are not modified."""
    evaluations = []
    for coef in coefs:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            loss = loss_of(*leaves, label_T, coef, target)
            grads = torch.autograd.grad(loss, leaves)
        evaluations.append(Evaluation(float(loss.detach()), tuple(grad.detach() for grad in grads)))
    return evaluations


def interpreted(implementation: Implementation) -> bool:
    """Whether it can run on this machine only in Triton's interpreter, which is slow."""
    return implementation.kernel and not torch.cuda.is_available()


_children: list[subprocess.Popen[str]] = []
"""The process with Triton's interpreter, once there is one. It runs one job at a time and ends with this process."""


def _in_child(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    if not _children or _children[0].poll() is not None:
        isa = {} if native_bf16_products_work() else {ISA_VARIABLE: SAFE_ISA}
        _children[:] = [
            subprocess.Popen(
                [sys.executable, "-m", __name__],
                env={**os.environ, "TRITON_INTERPRET": "1", **isa},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        ]
    child = _children[0]
    assert child.stdin is not None
    assert child.stdout is not None
    with tempfile.TemporaryDirectory(prefix="zloss-interpreted-") as folder:
        arguments = (implementation.name, list(inputs), label_T, list(coefs), target)
        torch.save((arguments, torch.get_num_threads()), Path(folder, "job.pt"))
        try:
            child.stdin.write(f"{folder}\n")
            child.stdin.flush()
            reply = child.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if reply != "done\n":
            failure = reply.strip() if reply else f"its process ended with code {child.wait()}"
            raise InputError(f"{implementation.title} cannot run on Triton's interpreter: {failure}.")
        answers = torch.load(Path(folder, "answer.pt"), weights_only=True)
    return [Evaluation(value, tuple(grads)) for value, grads in answers]


def _serve(folders: TextIO, replies: TextIO) -> None:
    """What the child process does: one line in, one line out, until the parent closes its end."""
    for line in folders:
        folder = line.rstrip("\n")
        try:
            (name, *arguments), threads = torch.load(Path(folder, "job.pt"), weights_only=True)
            torch.set_num_threads(threads)
            found = call(find_implementation(name).loss, *arguments)
            torch.save([(value, list(grads)) for value, grads in found], Path(folder, "answer.pt"))
            reply = "done"
        except Exception as error:
            reply = first_line(error)
        print(reply, file=replies, flush=True)


if __name__ == "__main__":
    # Output of other packages must not be mistaken for a reply.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, out)
