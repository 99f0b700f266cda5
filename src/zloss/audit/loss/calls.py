"""Calling a user's loss as a training step would: a probe in, its scalar and its gradient at the logits out.

Axes: T tokens, V vocabulary, B sequences. Losses of (hidden, weight, target) are called on heads that hold the wanted logits.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from zloss.audit.loss.probes import Probe, Space, draw, logit_gradients, sparse_head
from zloss.errors import InputError, UnknownNameError

LOSS_NAMES = ("total_loss", "loss", "total")
"""What a trained value is called; one without a gradient is never taken."""
Z_NAMES = ("z_loss", "zloss", "z", "auxiliary")


class LossCallError(InputError):
    """The audited loss raised, or returned something that is not a loss."""


class LossTimeoutError(InputError):
    """A call of the audited loss took longer than `time_limit`."""


@dataclass(frozen=True)
class Outcome:
    """One call, in fp64 on the CPU, whatever the loss computed in."""

    value: float
    grad_TV: Tensor
    """∂(upstream · loss)/∂logits."""
    hidden_TT: Tensor | None
    """δ · logitsᵀ as read from the gradient at hidden; None for a loss of logits."""
    beyond: float
    """Norm of the gradient on rows that have no target, which only a loss that shifts its targets is given."""
    others: dict[str, Tensor]
    """The scalars that were returned in addition to the loss."""
    overwritten: tuple[str, ...]
    """The arguments whose contents had changed."""
    unit: float
    """Unit roundoff of the value."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.value) and bool(self.grad_TV.isfinite().all())


@dataclass
class Loss:
    """One loss function and its calling convention; every call gets fresh inputs and the same random state."""

    function: Callable[..., Any]
    name: str
    linear: bool = False
    ignore_index: int = -100
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    time_limit: float | None = None
    """Seconds that a call may take: checked when it returns."""
    dtype: torch.dtype = torch.float32
    """What it is called in unless a call says otherwise."""
    sequences: int = 0
    """B of [B, T/B, V]; 0 for losses that take [T, V]."""
    transposed: bool = False
    """Whether a linear loss expects its weight as [D, V]."""
    shift: int = 0
    """Row t is trained on target t + shift."""
    rolled: bool = False
    """Row t is trained on target t + 1, and the last row on target 0."""
    calls: int = 0

    @property
    def targets(self) -> str:
        return "rolled" if self.rolled else "given" if not self.shift else "shifted"

    def like(self, function: Callable[..., Any], name: str) -> Loss:
        """Another loss, called the way this one is."""
        return replace(self, function=function, name=name, calls=0)

    def __call__(
        self,
        probe: Probe,
        dtype: torch.dtype | None = None,
        *,
        upstream: float | Tensor = 1.0,
        through: str | None = None,
        seed: int | None = None,
    ) -> Outcome:
        """Forward and backward; `upstream` multiplies the loss, a [T] tensor the losses of a per-token variant.

        `through`: a returned value to differentiate instead of the loss.
        """
        logits_TV, target_T = self._placed(probe)
        rows_TV = logits_TV.detach().to(self.device, dtype or self.dtype, copy=True)
        leaves = [x.requires_grad_() for x in (sparse_head(rows_TV) if self.linear else (rows_TV,))]
        loss, others, overwritten = self._run(leaves, target_T, upstream, through, seed)
        grad_TV, *rest = [
            (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).detach().cpu().double() for leaf in leaves
        ]
        hidden_TT = None
        if self.linear:
            grad_TV, hidden_TT = logit_gradients(grad_TV, rest[0])
        counted = self._counted(len(logits_TV))
        return Outcome(
            value=float(loss.double().sum()),
            grad_TV=grad_TV[counted],
            hidden_TT=None if hidden_TT is None else hidden_TT[counted][:, counted],
            beyond=float(grad_TV.index_fill(0, counted, 0.0).norm()),
            others=others,
            overwritten=overwritten,
            unit=torch.finfo(loss.dtype).eps / 2,
        )

    def attempt(self, probe: Probe, dtype: torch.dtype | None = None) -> Outcome | None:
        """The same; None if the loss fails or is not finite."""
        try:
            outcome = self(probe, dtype)
        except LossCallError:
            return None
        return outcome if outcome.finite else None

    def on_head(
        self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, dtype: torch.dtype, *, upstream: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(value, ∂/∂hidden, ∂/∂weight) of a linear loss on a real head; gradients in fp64, of `upstream` times the loss."""
        place = replace(self, linear=False)._placed(Probe(hidden_TD, target_T, hidden_TD.shape[-1]))
        leaves = [x.detach().to(self.device, dtype, copy=True).requires_grad_() for x in (place[0], weight_VD)]
        loss, _, _ = self._run(leaves, place[1], upstream, None, None)
        hidden, weight = ((torch.zeros_like(x) if x.grad is None else x.grad).cpu().double() for x in leaves)
        return loss, hidden[self._counted(len(hidden))], weight

    def _placed(self, probe: Probe) -> tuple[Tensor, Tensor]:
        """Rows and targets as the loss wants them: a loss that shifts gets rows without a target at the end of each sequence."""
        rows, target_T = probe.logits_TV, torch.where(probe.valid_T, probe.target_T, self.ignore_index)
        if self.rolled:
            return rows, target_T.roll(1)
        if not self.shift:
            return rows, target_T
        sequences = [x.chunk(max(self.sequences, 1)) for x in (rows, target_T)]
        ends = torch.zeros_like(rows[: self.shift])
        return (
            torch.cat([part for one in sequences[0] for part in (one, ends)]),
            torch.cat([part for one in sequences[1] for part in (target_T[: self.shift], one)]),
        )

    def _counted(self, rows: int) -> Tensor:
        """The places of the probe's rows among those of a call."""
        length = rows // max(self.sequences, 1)
        return (torch.arange(rows) % length < length - self.shift).nonzero().flatten()

    def _run(
        self, leaves: list[Tensor], target_T: Tensor, upstream: float | Tensor, through: str | None, seed: int | None
    ) -> tuple[Tensor, dict[str, Tensor], tuple[str, ...]]:
        self.calls += 1
        # Copies, as logits are in a model: a loss that works in place can, and the leaf keeps the truth.
        given = [*(leaf.clone() for leaf in leaves), target_T.to(self.device, copy=True)]
        names = ("hidden", "weight", "target") if len(leaves) == 2 else ("logits", "target")
        arguments = [
            x.reshape(self.sequences, -1, *x.shape[1:]) if self.sequences and name != "weight" else x
            for name, x in zip(names, given, strict=True)
        ]
        if self.transposed:
            arguments[1] = arguments[1].T
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(), process_restored(), _random_state(self.seed if seed is None else seed):
                warnings.simplefilter("ignore")
                # oneDNN's 16-bit products end the process on CPUs that claim instructions they lack.
                with torch.enable_grad(), torch.backends.mkldnn.flags(enabled=False):
                    vocab = leaves[1].shape[0] if len(leaves) == 2 else leaves[0].shape[1]
                    loss, others = read(self.function(*arguments), len(target_T) * vocab // 2)
                    per_token = isinstance(upstream, Tensor)
                    if loss.numel() != (len(target_T) if per_token else 1):
                        wanted = f"one value for each of {len(target_T)} targets" if per_token else "a scalar"
                        raise LossCallError(
                            f"{self.name} returned a tensor of shape {list(loss.shape)}, but {wanted} is expected. A loss with "
                            "reduction='none' belongs in `per_token=`."
                        )
                    root = loss if through is None else others[through]
                    if root.requires_grad:
                        factor = upstream.to(root).view_as(root) if isinstance(upstream, Tensor) else upstream
                        torch.autograd.backward((root * factor).sum())
        except LossCallError:
            raise
        except (Exception, SystemExit) as error:
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(names, arguments, strict=True))
            first = (str(error).replace("`", "'").strip().splitlines() or ["no message"])[0][:300]
            raise LossCallError(
                f"{self.name} raised {type(error).__name__} ({first}) when called with {shapes} in {dtype_name(leaves[0].dtype)}."
            ) from error
        if self.time_limit and time.perf_counter() - started > self.time_limit:
            raise LossTimeoutError(
                f"one call of {self.name} took {time.perf_counter() - started:.2g} s, but `time_limit` is {self.time_limit:g} "
                "(0: none)."
            )
        before = [*(leaf.detach() for leaf in leaves), target_T.to(self.device)]
        overwritten = tuple(
            name
            for name, was, now in zip(names, before, given, strict=True)
            if not torch.equal(was, now.detach()) and not torch.equal(was.nan_to_num(), now.detach().nan_to_num())
        )
        return loss.detach(), others, overwritten


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def loss_name(function: Callable[..., Any]) -> str:
    """What an audit calls a loss that was given no name."""
    return f"the loss {getattr(function, '__qualname__', None) or type(function).__name__!r}"


# The calling convention.


def find_call(loss: Loss, space: Space) -> None:
    """Set axes, dtype, layout of the weight, and where targets are looked for; the first error is raised."""
    probe, refused = draw("mixed", space, loss.seed), []
    ways = [
        (sequences, transposed, dtype)
        for transposed in ((False, True) if loss.linear else (False,))
        for sequences in (0, 1)
        for dtype in (torch.float32, torch.float64)
    ]
    for loss.sequences, loss.transposed, loss.dtype in ways:
        try:
            outcome = loss(probe)
        except LossCallError as error:
            refused.append(error)
            continue
        break
    else:
        raise LossCallError(f"{refused[0]}{_hint(loss, space)}") from refused[0].__cause__
    if not outcome.finite:
        raise LossCallError(
            f"{loss.name} gave a loss or gradient that is not finite on ordinary logits with valid targets: there is nothing to "
            "identify. Check it on `torch.randn(64, 96)` first."
        )
    if not outcome.grad_TV.any() and not outcome.beyond:
        raise LossCallError(
            f"{loss.name} returned a loss without a gradient at its inputs, so it cannot train anything: return it before "
            "`.detach()` or `.item()`, and do not call it under `torch.no_grad()`."
        )
    _find_targets(loss, space, probe)


def _find_targets(loss: Loss, space: Space, probe: Probe) -> None:
    """Which row's gradient follows a changed target: its own, the one before it (labels shifted inside), or the last (rolled)."""

    def moved(at: int) -> int | None:
        changed = probe.target_T.clone()
        others = [c for c in range(space.lanes) if c not in space.avoid and c != int(changed[at])]
        changed[at] = others[(7 * at) % len(others)]
        before, after = loss(probe).grad_TV, loss(replace(probe, target_T=changed)).grad_TV
        change_T = (after - before).norm(dim=-1)
        return int(change_T.argmax()) if float(change_T.max()) > 1e-6 * float(before.norm()) else None

    middle = space.tokens // 2
    if (row := moved(middle)) is not None and 0 < middle - row <= space.tokens // 4:
        loss.rolled = middle - row == 1 and moved(0) == space.tokens - 1
        loss.shift = 0 if loss.rolled else middle - row


def _hint(loss: Loss, space: Space) -> str:
    """What to pass instead, read from the signature."""
    try:
        parameters = list(inspect.signature(loss.function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    needed = [p.name.lower() for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not loss.linear and len(needed) == 3:
        return " A loss of (hidden, weight, target) is audited with `linear=True`."
    if loss.linear and len(needed) == 2:
        return " A loss of (logits, target) is audited without `linear`."
    return (
        f" The probes have T = {space.tokens} and V = {space.lanes}: pass `tokens=` or `vocab=` if it takes other sizes only. "
        "A loss that needs a GPU is audited on a machine that has one."
    )


def router_arguments(function: Callable[..., Any]) -> str | None:
    """The first two parameters in words if they are those of a router's Z-loss, `f(logits, coefficient)`."""
    try:
        names = [name.lower() for name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return None
    targets = any(word in name for name in names for word in ("target", "label"))
    if len(names) < 2 or targets or not any(word in names[1] for word in ("coef", "lambda")):
        return None
    return f"({names[0]}, {names[1]})"


# What the loss returned.


def loss_of(returned: Any) -> Tensor:
    """The loss in what a function returned: a tensor, or the part of a tuple, mapping or object that an audit would take."""
    return read(returned, 2)[0]


def read(returned: Any, wide: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The trained value of a tensor, tuple, mapping or object, and its other scalars.

    The trained value is `total_loss`, `loss` or `total`, else the first entry, among those with a gradient; entries as large as
    the logits, in front of the loss in models that return (logits, loss), are skipped.
    """
    if isinstance(returned, Tensor):
        return returned, {}
    entries = {name: x for name, x in _entries(returned) if isinstance(x, Tensor) and (x.dim() < 2 or x.numel() < wide)}
    trained = [name for name in entries if entries[name].requires_grad]
    named = next((name for name in LOSS_NAMES if name in trained), None)
    name = named or next(
        iter(trained), next((name for name in LOSS_NAMES if name in entries), next(iter(entries), None))
    )
    if name is None:
        raise LossCallError(
            "a loss is expected to return a scalar tensor, a tuple whose first item is the loss, or an object with `.loss`, but "
            f"it returned {'None' if returned is None else 'a ' + type(returned).__name__}."
        )
    loss = entries.pop(name)
    return loss, {key: x for key, x in entries.items() if x.numel() == 1 and x.is_floating_point()}


def _entries(returned: Any) -> Iterator[tuple[str, Any]]:
    """Named entries, those of nested containers as `name.entry`."""
    if isinstance(returned, tuple) and hasattr(returned, "_asdict"):
        returned = returned._asdict()
    if isinstance(returned, (tuple, list)):
        returned = {f"item {i}": x for i, x in enumerate(returned)}
    elif not isinstance(returned, Mapping):
        stored = [name for name in getattr(returned, "__dict__", {}) if not name.startswith("_")]
        known = [name for name in (*LOSS_NAMES, *Z_NAMES) if hasattr(returned, name)]
        returned = {name: getattr(returned, name) for name in dict.fromkeys((*stored, *known))}
    for name, value in returned.items():
        if isinstance(value, Mapping) and str(name).startswith("item"):
            yield from _entries(value)
        elif isinstance(value, (tuple, list, Mapping)):
            yield from ((f"{name}.{key}", x) for key, x in _entries(value))
        else:
            yield str(name), value


# The process around a call.


@contextlib.contextmanager
def process_restored(*, environment_too: bool = True) -> Iterator[None]:
    """Run user code and put the working directory, the environment and the standard streams back as they were."""
    environment = dict(os.environ)
    with contextlib.ExitStack() as stack:
        # Entered with what is there now, these put it back at the end.
        stack.enter_context(contextlib.redirect_stdout(sys.stdout))
        stack.enter_context(contextlib.redirect_stderr(sys.stderr))
        with contextlib.suppress(FileNotFoundError):  # the folder itself may be gone
            stack.enter_context(contextlib.chdir(os.getcwd()))
        try:
            yield
        finally:
            if environment_too and dict(os.environ) != environment:
                os.environ.clear()
                os.environ.update(environment)


@contextlib.contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """The generators of torch, Python and NumPy in one known state; theirs again afterwards."""
    python_state, numpy_state = random.getstate(), numpy.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        # Without a GPU `torch.manual_seed` still queues a CUDA call with a formatted stack trace, which takes milliseconds.
        (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python_state)
            numpy.random.set_state(numpy_state)  # noqa: NPY002


# A loss by its name.


def load_function(name: str) -> Callable[..., Any]:
    """The callable that `module:function`, `module:object.method` or `path/to/file.py:function` points at.

    The current folder is importable, as with `python -m`, and so is the folder of a file, as with `python file.py`.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise InputError(f"a loss is named MODULE:FUNCTION, for example `mypackage.losses:ce_z`, but got {name!r}.")
    module = _module(module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            named = {key: getattr(found, key) for key in dir(found) if not key.startswith("_")}
            public = [key for key, value in named.items() if callable(value)]
            # What a file imports comes after what it defines.
            public.sort(key=lambda key: getattr(named[key], "__module__", None) != getattr(module, "__name__", None))
            raise UnknownNameError(f"name in {module_name}", attribute, public[:40], alike=0.7)
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{name} is of type {type(found).__name__}, not a function.")
    if isinstance(found, type):
        raise InputError(
            f"{name} is a class, not a loss: create an instance in the file, `loss = {attribute}(…)`, and name that."
        )
    function: Callable[..., Any] = found
    return function


def _module(name: str) -> ModuleType:
    try:
        with process_restored(environment_too=False):  # an imported module may set variables that its loss needs
            folder = str(Path(name).resolve().parent) if name.endswith(".py") else os.getcwd()
            if folder not in sys.path:
                sys.path.insert(0, folder)
            return _from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or ["no message"])[0][:300]
        raise InputError(
            f"cannot import {name!r} ({type(error).__name__}: {first}). Name a module that can be imported from here, or a "
            "file that ends in .py."
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path} does not exist.")
    spec = importlib.util.spec_from_file_location(f"_zloss_audited_{path.stem}", path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles inside the file look their module up by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
