"""Implementations of CE + Z by name (ours, PyTorch's, those of other packages), and their gradients at several λ.

Each is one function of tensors and λ, sum-reduced so that a 1/N cannot push 16-bit gradients below their range:

    logits:  loss(logits [T, V], label [T], coef, target)
    linear:  loss(hidden [T, D], weight [V, D], label [T], coef, target)

Packages are imported when an implementation is loaded. Triton decides on import whether kernels are compiled or
interpreted, so without a GPU they run in a child process, one for the life of this process; tensors travel as files.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor

from zloss.errors import InputError, MissingDependencyError, UnknownNameError, first_line
from zloss.measure.bf16_products import ISA_VARIABLE, SAFE_ISA, native_bf16_products_work
from zloss.source.objectives.standard import StandardZLoss
from zloss.transport.head_loss import head_loss
from zloss.transport.logits_loss import logits_loss

Loss = Callable[..., Tensor]
Takes = Literal["logits", "linear"]
EXTRAS = {"triton": "triton", "liger_kernel": "peers", "cut_cross_entropy": "peers"}
"""Package → the extra of zloss that installs it."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute CE + λ(log Z − c)², and what must be known to run it."""

    name: str
    title: str
    takes: Takes
    load: Callable[[], Loss]
    package: str | None = None
    """Module it comes from; None: this package or torch."""
    has_z: bool = True
    fixed_target: float | None = None
    """The only c it knows; None: any."""
    kernel: bool = False
    """Whether it is made of Triton kernels: a GPU, or Triton's interpreter in a process of its own."""
    backend: str | None = None
    """Ours: the backend it runs."""

    torch_function: str | None = None
    """Name of the function of `torch.nn.functional` that it calls, where older versions of torch lack it."""

    @property
    def installed(self) -> bool:
        """Whether it can be loaded here."""
        return not self._missing_packages() and self._torch_has_it()

    def require(self) -> None:
        """One sentence where it cannot be loaded."""
        for package in self._missing_packages():
            if package in EXTRAS:
                raise MissingDependencyError(package, f"Auditing {self.title}", EXTRAS[package])
            raise InputError(
                f"auditing {self.title} needs the package {package!r}, which is not installed and which no extra of zloss "
                f"installs: install it, or leave {self.name!r} out."
            )
        if not self._torch_has_it():
            raise InputError(
                f"auditing {self.title} needs a torch with torch.nn.functional.{self.torch_function}, but torch "
                f"{torch.__version__} has none: use a newer one, or leave {self.name!r} out."
            )

    def _missing_packages(self) -> list[str]:
        needed = [*([self.package] if self.package else []), *(["triton"] if self.kernel else [])]
        return [name for name in needed if importlib.util.find_spec(name) is None]

    def _torch_has_it(self) -> bool:
        return self.torch_function is None or hasattr(F, self.torch_function)


def _of_package(module: str, name: str) -> Any:
    """A function of a package that may not be there, imported now."""
    return getattr(importlib.import_module(module), name)


def _ours(backend: str) -> Callable[[], Loss]:
    def load() -> Loss:
        def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
            objective = StandardZLoss(coef, target)
            options: dict[str, Any] = {"reduction": "sum", "statistics": "light", "backend": backend}
            return logits_loss(logits, label, objective, **options).loss

        return loss

    return load


def _ours_linear(backend: str) -> Callable[[], Loss]:
    def load() -> Loss:
        def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
            objective = StandardZLoss(coef, target)
            options: dict[str, Any] = {"reduction": "sum", "statistics": "light", "backend": backend}
            return head_loss(hidden, weight, label, objective, **options).loss

        return loss

    return load


def _manual_z(logits: Tensor, coef: float, target: float) -> Tensor:
    """The penalty as it is written by hand: fp32 logsumexp of the logits as they are stored."""
    return coef * ((torch.logsumexp(logits.float(), dim=-1) - target) ** 2).sum()


def _builtin() -> Loss:
    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        return F.cross_entropy(logits, label, reduction="sum") + _manual_z(logits, coef, target)

    return loss


def _log_softmax() -> Loss:
    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        log_p = F.log_softmax(logits.float(), dim=-1)
        return -log_p.gather(1, label.unsqueeze(1)).sum() + _manual_z(logits, coef, target)

    return loss


def _torch_projection() -> Loss:
    inner = _builtin()

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        return inner(F.linear(hidden, weight), label, coef, target)

    return loss


def _torch_linear() -> Loss:
    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        linear: Any = F.linear_cross_entropy
        options: Any = torch.nn.LinearCrossEntropyOptions
        out: Tensor = linear(
            hidden, weight, label, reduction="sum", options=options(batch_chunk_size=256, chunking_method=None)
        )
        return out

    return loss


def _liger() -> Loss:
    liger_cross_entropy = _of_package("liger_kernel.transformers.functional", "liger_cross_entropy")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        # It writes the gradient over its input; the copy keeps the caller's logits.
        out: Tensor = liger_cross_entropy(logits.clone(), label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _liger_linear() -> Loss:
    fused = _of_package("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        out: Tensor = fused(hidden, weight, label, reduction="sum", lse_square_scale=coef)
        return out

    return loss


def _cut() -> Loss:
    linear_cross_entropy = _of_package("cut_cross_entropy", "linear_cross_entropy")

    def loss(hidden: Tensor, weight: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        impl = "cce" if hidden.device.type == "cuda" else "torch_compile"
        out: Tensor = linear_cross_entropy(hidden, weight, label, reduction="sum", impl=impl)
        return out

    return loss


def _flash() -> Loss:
    cross_entropy_loss = _of_package("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")

    def loss(logits: Tensor, label: Tensor, coef: float, target: float) -> Tensor:
        losses, _ = cross_entropy_loss(logits, label, lse_square_scale=coef)
        out: Tensor = losses.sum()
        return out

    return loss


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("dense", "zloss, dense", "logits", _ours("dense"), backend="dense"),
        Implementation("chunked", "zloss, chunked", "logits", _ours("chunked"), backend="chunked"),
        Implementation("triton", "zloss, Triton", "logits", _ours("triton"), kernel=True, backend="triton"),
        Implementation("torch-ce", "F.cross_entropy + manual Z", "logits", _builtin),
        Implementation("log-softmax", "fp32 log_softmax CE + manual Z", "logits", _log_softmax),
        Implementation("liger", "Liger cross-entropy", "logits", _liger, "liger_kernel", True, 0.0, True),
        Implementation("flash-attn", "flash-attn cross-entropy", "logits", _flash, "flash_attn", True, 0.0, True),
        Implementation(
            "dense-linear", "zloss, dense, from hidden states", "linear", _ours_linear("dense"), backend="dense"
        ),
        Implementation(
            "chunked-linear", "zloss, chunked, from hidden states", "linear", _ours_linear("chunked"), backend="chunked"
        ),
        Implementation(
            "triton-linear",
            "zloss, Triton, from hidden states",
            "linear",
            _ours_linear("triton"),
            kernel=True,
            backend="triton",
        ),
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
"""By name, in the order tables show them."""


def find_implementation(name: str) -> Implementation:
    """The implementation of a name."""
    if name not in IMPLEMENTATIONS:
        raise UnknownNameError("implementation", name, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[name]


@dataclass(frozen=True)
class Evaluation:
    """One call: the scalar, and its gradient at every input, in the dtype the implementation returns it in."""

    value: float
    grads: tuple[Tensor, ...]


def evaluate(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """One evaluation per λ, where the implementation can run: here, on the GPU, or interpreted.

    Gradients come back on the device of the inputs.
    """
    implementation.require()
    if not implementation.kernel or _interpreted_here():
        return call(implementation, inputs, label_T, coefs, target)
    if torch.cuda.is_available():
        moved = [tensor.cuda() for tensor in inputs]
        evaluations = call(implementation, moved, label_T.cuda(), coefs, target)
        return [
            Evaluation(evaluation.value, tuple(grad.to(inputs[0].device) for grad in evaluation.grads))
            for evaluation in evaluations
        ]
    return _in_child(implementation, inputs, label_T, coefs, target)


def call(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    """The evaluations, in this process; the inputs are left as they are."""
    loss_of = implementation.load()
    evaluations = []
    for coef in coefs:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            loss = loss_of(*leaves, label_T, coef, target)
            grads = torch.autograd.grad(loss, leaves)
        evaluations.append(Evaluation(float(loss.detach()), tuple(grad.detach() for grad in grads)))
    return evaluations


def interpreted(implementation: Implementation) -> bool:
    """Whether it runs on Triton's interpreter here, which is slow."""
    return implementation.kernel and not torch.cuda.is_available()


def _interpreted_here() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _in_child(
    implementation: Implementation, inputs: Sequence[Tensor], label_T: Tensor, coefs: Sequence[float], target: float
) -> list[Evaluation]:
    with tempfile.TemporaryDirectory(prefix="zloss-interpreted-") as folder:
        job, answer = Path(folder, "job.pt"), Path(folder, "answer.pt")
        record = {"name": implementation.name, "inputs": list(inputs), "label": label_T, "coefs": list(coefs)}
        torch.save({**record, "target": target, "threads": torch.get_num_threads()}, job)
        failure = _interpreter().run(job, answer)
        if failure:
            raise InputError(f"{implementation.title} cannot run on Triton's interpreter: {failure}.")
        answers: list[dict[str, Any]] = torch.load(answer, weights_only=True)
    return [Evaluation(item["value"], tuple(item["grads"])) for item in answers]


class _Interpreter:
    """A child process with TRITON_INTERPRET=1 that answers one job at a time and ends with this process."""

    def __init__(self) -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        if not native_bf16_products_work():
            environment |= {ISA_VARIABLE: SAFE_ISA}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Path, answer: Path) -> str:
        """Empty when the answer is written, else what went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{job}\t{answer}\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            return f"its process ended with code {self._process.wait()}"
        return reply.strip().removeprefix("done").strip()


@functools.cache
def _running() -> list[_Interpreter]:
    return []


def _interpreter() -> _Interpreter:
    """The living child, or a new one."""
    running = _running()
    if not running or not running[0].alive:
        running[:] = [_Interpreter()]
    return running[0]


def _serve(jobs: TextIO, replies: TextIO) -> None:
    """The other side: one line in, one line out, until the parent closes its end."""
    for line in jobs:
        job, answer = line.rstrip("\n").split("\t")
        try:
            _answer(job, answer)
            reply = "done"
        except Exception as error:
            reply = first_line(error)
        print(reply, file=replies, flush=True)


def _answer(job: str, answer: str) -> None:
    record: dict[str, Any] = torch.load(job, weights_only=True)
    torch.set_num_threads(record["threads"])
    implementation = find_implementation(record["name"])
    evaluations = call(implementation, record["inputs"], record["label"], record["coefs"], record["target"])
    torch.save([{"value": evaluation.value, "grads": list(evaluation.grads)} for evaluation in evaluations], answer)


if __name__ == "__main__":
    # Whatever a package prints must not be taken for a reply.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _serve(sys.stdin, out)
