"""Calling a user's loss: inputs in, scalar, logit gradient and side effects out; and its calling convention.

Axes: T tokens, V vocabulary, D width. Linear losses are called on heads that hold the wanted logits (`probes.sparse_head`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import os
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from zloss.audit.loss import probes
from zloss.audit.loss.probes import Probe, Space
from zloss.errors import InputError, UnknownNameError

LOSS_NAMES = ("loss", "total_loss", "total")
Z_NAMES = ("z_loss", "auxiliary", "zloss", "z", "aux_loss")


class LossCallError(InputError):
    """The audited loss raised, or returned something that is not a loss."""


class LossTimeoutError(InputError):
    """The audited loss did not return in time. No other size is tried after it."""


@dataclass(frozen=True)
class Reported:
    """A value that was returned in addition to the loss: its number (None if not a scalar), dtype, and whether it claims
    a gradient."""

    value: float | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    requires_grad: bool


@dataclass(frozen=True)
class Outcome:
    """One call: everything in fp64 on the CPU, whatever the loss computed in."""

    value: float
    dtype: torch.dtype
    grad_TV: Tensor
    """∂(upstream · loss)/∂logits."""
    hidden_grad_TT: Tensor | None
    """∂loss/∂hidden at the columns of the tokens, each times its s: δ · logitsᵀ; None for a loss of logits."""
    has_gradient: bool
    """False when the loss came without a graph."""
    reported: dict[str, Reported]
    """By key or attribute, or "item 1" for the second entry of a tuple."""
    overwritten: tuple[str, ...]
    """Names of the arguments whose contents had changed after backward."""
    beyond: float = 0.0
    """Norm of the gradient on the extra row without a target, which only a loss that shifts its targets is given."""

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.grad_TV).all()) and math.isfinite(self.value)


@dataclass
class BlackBox:
    """Calls one loss function the way a training step would; every call gets fresh inputs and the same RNG state."""

    function: Callable[..., Any]
    name: str
    linear: bool
    device: torch.device
    seed: int
    ignore_index: int = -100
    batched: bool = False
    """Whether the loss expects a leading batch axis, [1, T, V] and [1, T]."""
    targets: Literal["given", "shifted", "rolled"] = "given"
    """Where the loss itself looks for the target of row t; the call moves ours there."""
    added: str | None = None
    """Name of a returned value that is added to the first one, for losses whose caller adds them."""
    transposed: bool = False
    """Whether a linear loss expects its weight as [D, V]."""
    dtype: torch.dtype = torch.float64
    """What the loss is called in unless a call says otherwise."""
    time_limit: float | None = None
    """Seconds that one call may take; None or 0: no limit."""
    calls: int = 0

    def like(self, function: Callable[..., Any], name: str) -> BlackBox:
        """Another loss, called the way this one is."""
        return replace(self, function=function, name=name, added=None, calls=0)

    def __call__(
        self,
        probe: Probe,
        dtype: torch.dtype | None = None,
        *,
        upstream: float | Tensor = 1.0,
        through: str | None = None,
        per_token: bool = False,
        seed: int | None = None,
    ) -> Outcome:
        """Forward and backward; `upstream` multiplies the output (a [T] tensor for a per-token loss).

        `through` names a returned value to differentiate instead of the loss.
        """
        tokens = len(probe.target_T)
        logits_TV, target_T = self._moved(probe.logits_TV, probe.target_T)
        leaves = self._leaves(logits_TV, dtype or self.dtype)
        arguments, loss, items = self._forward(leaves, target_T, seed)
        if loss.numel() != (len(target_T) if per_token else 1):
            kind = f"a tensor of shape {list(arguments[-1].shape)}" if per_token else "a scalar"
            hint = "" if per_token else " A loss with reduction='none' belongs in `per_token=`."
            raise LossCallError(
                f"{self.name} returned a tensor of shape {list(loss.shape)} for {len(target_T)} targets, "
                f"but {kind} is expected.{hint}"
            )
        root = loss if through is None else items[through]
        if root.requires_grad:
            factor = upstream.to(root).view_as(root) if isinstance(upstream, Tensor) else upstream
            self._guarded((root * factor).sum().backward, arguments)
        before = [*(leaf.detach() for leaf in leaves), self._target(target_T)]
        grads, hidden_TT = _gradients(leaves, 0.0), None
        grad_TV = grads[0]
        if self.linear:
            grad_TV, hidden_TT = probes.logit_gradients(grads)
        return Outcome(
            value=float(loss.detach().double().sum()),
            dtype=loss.dtype,
            grad_TV=grad_TV[:tokens],
            hidden_grad_TT=None if hidden_TT is None else hidden_TT[:tokens, :tokens],
            has_gradient=root.requires_grad,
            reported={name: _reported(value) for name, value in items.items()},
            overwritten=tuple(
                name
                for name, was, now in zip(self._names, before, arguments, strict=True)
                if not _same(was, now.detach())
            ),
            beyond=float(grad_TV[tokens:].norm()),
        )

    def attempt(self, probe: Probe, dtype: torch.dtype | None = None) -> Outcome | None:
        """The same; None if the loss fails or is not finite."""
        try:
            outcome = self(probe, dtype)
        except LossCallError:
            return None
        return outcome if outcome.finite else None

    def value(self, logits_TV: Tensor, target_T: Tensor) -> float:
        """The scalar alone, as a training step would see it (inputs still require gradients)."""
        logits_TV, target_T = self._moved(logits_TV, target_T)
        return float(self._forward(self._leaves(logits_TV, self.dtype), target_T, None)[1].detach().double().sum())

    def on_head(
        self, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, dtype: torch.dtype
    ) -> tuple[float, Tensor, Tensor]:
        """(value, ∂/∂hidden, ∂/∂weight) of a linear loss on a real head, targets moved; gradients in fp64, NaN if none."""
        tokens = len(target_T)
        hidden_TD, target_T = self._moved(hidden_TD, target_T)
        leaves = [x.detach().to(self.device, dtype).requires_grad_() for x in (hidden_TD, weight_VD)]
        arguments, loss, _ = self._forward(leaves, target_T, None)
        if loss.requires_grad:
            self._guarded(loss.sum().backward, arguments)
        hidden, weight = _gradients(leaves, math.nan)
        return float(loss.detach().double().sum()), hidden[:tokens], weight

    def _forward(
        self, leaves: list[Tensor], target_T: Tensor, seed: int | None
    ) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
        """The arguments of one call, the loss it returned, and the other values it returned."""
        self.calls += 1
        # Non-leaf copies, as logits are in a model: a loss that works in place can, and the leaf keeps the truth.
        arguments = [*(leaf.clone() for leaf in leaves), self._target(target_T)]
        vocab = leaves[1].shape[0] if self.linear else leaves[0].shape[-1]
        inputs = [
            x.unsqueeze(0) if self.batched and name != "weight" else x
            for name, x in zip(self._names, arguments, strict=True)
        ]
        if self.transposed:
            inputs[1] = inputs[1].T

        def call() -> tuple[Tensor, dict[str, Any]]:
            with _random_state(self.seed if seed is None else seed), torch.enable_grad():
                returned = self.function(*inputs)
            # Reading may run user code too: `.loss` may be a property. A loss that shifts may return logits one row shorter.
            return _read_output(returned, self.name, len(target_T) * vocab // 2)

        loss, items = self._guarded(call, arguments)
        return arguments, (loss if self.added is None else loss + items[self.added]), items

    def _moved(self, logits_TV: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
        """Place targets where the loss looks for them. A shifting loss gets one more row, which it gives no target."""
        if self.targets == "rolled":
            return logits_TV, target_T.roll(1)
        if self.targets == "shifted":
            return torch.cat([logits_TV, torch.zeros_like(logits_TV[-1:])]), torch.cat([target_T[:1], target_T])
        return logits_TV, target_T

    def _target(self, target_T: Tensor) -> Tensor:
        """Our −1 for ignored tokens becomes the caller's index."""
        return torch.where(target_T < 0, torch.full_like(target_T, self.ignore_index), target_T).to(self.device)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("hidden", "weight", "target") if self.linear else ("logits", "target")

    def _leaves(self, logits_TV: Tensor, dtype: torch.dtype) -> list[Tensor]:
        logits_TV = logits_TV.detach().to(self.device, dtype)
        inputs = probes.sparse_head(logits_TV) if self.linear else (logits_TV.clone(),)
        return [x.requires_grad_() for x in inputs]

    def _guarded(self, action: Callable[[], Any], arguments: list[Tensor]) -> Any:
        """Run user code and turn any exception into one sentence with the call and its shapes."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # oneDNN's 16-bit GEMMs end the process on CPUs that claim instructions they lack.
                native_off = torch.backends.mkldnn.flags(enabled=False) if self.device.type == "cpu" else nullcontext()
                with _limited(self.time_limit, self.name), native_off, _process_restored():
                    return action()
        except (LossCallError, LossTimeoutError, KeyboardInterrupt):
            raise
        except (Exception, SystemExit) as error:
            batch = [1] if self.batched else []
            shapes = [
                f"{name} {batch * (name != 'weight') + list(x.shape)}"
                for name, x in zip(self._names, arguments, strict=True)
            ]
            hints = _arguments_hint(self.function, self.linear, error) + _gpu_hint(error, self.device)
            raise LossCallError(
                f"{self.name} raised {_named_error(error)} when called with {', '.join(shapes)} in "
                f"{dtype_name(arguments[0].dtype)}.{hints}"
            ) from error


def _gradients(leaves: list[Tensor], missing: float) -> list[Tensor]:
    """The gradients of the leaves in fp64 on the CPU; one that has none is filled with `missing`."""
    grads = [torch.full_like(leaf, missing) if leaf.grad is None else leaf.grad for leaf in leaves]
    return [grad.detach().to("cpu", torch.float64) for grad in grads]


def _same(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors are equal, with a NaN equal to a NaN. Copies are only made where something differs."""
    return torch.equal(was, now) or torch.equal(was.nan_to_num(), now.nan_to_num())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def loss_name(function: Callable[..., Any]) -> str:
    """What an audit calls a loss that was given no name."""
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"the loss {name!r}"


# The calling convention of the loss.

COMMON_VOCABS = (
    1000, 100, 10, 128, 256, 512, 1024, 32000, 50257, 50304, 50265, 32768, 30522, 32128, 49152, 51200, 65536, 100352, 128256,
    151936, 256000,
)  # fmt: skip
COMMON_TOKENS = (128, 192, 256, 320, 384, 512, 640, 1024, 2048, 32, 16, 8, 4, 2)
SIZE_ERRORS = (AssertionError, RuntimeError, ValueError, IndexError)
"""Errors that a loss raises because of shapes. After any other error, no other size is tried."""


def find_call(box: BlackBox, space: Space, logits: Tensor | None) -> Space:
    """The space in which the loss runs, with layout and device set on `box`; else the error of the first rejected call is raised.

    The usual sizes, the vocabulary of the caller's `logits`, then common vocabularies and numbers of tokens.
    """
    devices = [box.device]
    if box.device.type == "cpu" and torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    spaces = [space]
    if logits is not None and logits.dim() >= 2 and not space.padded:
        spaces.append(space.with_vocab(logits.shape[-1]))
    refusals: list[LossCallError] = []
    for box.device, tried in product(devices, spaces):
        if (error := _refusal(box, tried)) is None:
            return tried
        refusals.append(error)
    box.device = devices[0]
    if isinstance(refusals[0].__cause__, SIZE_ERRORS):
        others = [replace(space, tokens=tokens) for tokens in COMMON_TOKENS]
        others += [] if space.padded else [space.with_vocab(vocab) for vocab in COMMON_VOCABS]
        for tried in others:
            if _refusal(box, tried) is not None:
                continue
            # Four times the rows where that is accepted: then smaller batches of the same granularity exist.
            larger = replace(tried, tokens=4 * tried.tokens)
            small = tried.tokens != space.tokens and larger.tokens * larger.width <= 2**21
            return larger if small and _refusal(box, larger) is None else tried
    raise refusals[0]


def _refusal(box: BlackBox, space: Space) -> LossCallError | None:
    """None if the loss runs, with or without a batch axis, with weight [V, D] or [D, V], in fp32 or fp64; else its error."""
    logits = torch.randn(1, space.width, generator=probes.seeded(0), dtype=torch.float64).expand(space.tokens, -1)
    target = probes.allowed(torch.arange(space.tokens) % space.lanes, space.lanes, space.avoid)
    probe = Probe(logits, target, space.lanes)
    refusal: LossCallError | None = None
    ways = product((False, True) if box.linear else (False,), (False, True), (torch.float32, torch.float64))
    for box.transposed, box.batched, dtype in ways:
        try:
            box(probe, dtype)
            return None
        except LossCallError as error:
            refusal = refusal or error
    return refusal


# What the loss returned.


def loss_of(returned: Any) -> Tensor:
    """The loss in what a function returned: a tensor, or the part of a tuple, mapping or object that an audit would take."""
    return _read_output(returned, "the loss", 2)[0]


def _read_output(returned: Any, name: str, logits_entries: int) -> tuple[Tensor, dict[str, Any]]:
    """The loss, and everything numeric next to it by name. Accepts a tensor, a tuple, a mapping or an object with `.loss`.

    The loss is the entry named `loss` (`total_loss`, `total`), else the first entry; an entry as large as the logits
    in front of it is skipped, as in models that return (logits, loss).
    """
    if isinstance(returned, Tensor):
        return returned, {}
    entries = list(_entries(returned))
    if not entries:
        raise LossCallError(
            f"{name} returned {_kind(returned)}, but a loss is expected: a scalar tensor, a tuple whose first item is "
            "the loss, or an object with `.loss`."
        )
    names = [key for key, _ in entries]
    wide = [isinstance(x, Tensor) and x.dim() >= 2 and x.numel() >= logits_entries > 1 for _, x in entries]
    index = next((names.index(key) for key in LOSS_NAMES if key in names), wide.index(False) if False in wide else 0)
    loss = entries[index][1]
    if not isinstance(loss, Tensor):
        raise LossCallError(
            f"{name} returned {_kind(loss)} as its loss, but a tensor with a gradient is expected: "
            "return the loss before `.item()` or `float()`."
        )
    return loss, {
        key: value
        for i, (key, value) in enumerate(entries)
        if i != index and isinstance(value, (Tensor, int, float)) and not isinstance(value, bool)
    }


def _entries(returned: Any) -> Iterator[tuple[str, Any]]:
    """Named entries, those of a nested mapping or tuple after the others' names."""
    if isinstance(returned, Mapping):
        pairs = [(str(key), value) for key, value in returned.items()]
    elif isinstance(returned, tuple) and (fields := getattr(returned, "_fields", None)):
        pairs = list(zip(fields, returned, strict=True))
    elif isinstance(returned, (tuple, list)):
        pairs = [(f"item {i}", value) for i, value in enumerate(returned)]
    elif any(hasattr(returned, key) for key in LOSS_NAMES):
        names = getattr(returned, "__dict__", {}) or getattr(returned, "__dataclass_fields__", {})
        stored = [key for key in names if not key.startswith("_")]
        known = [key for key in (*LOSS_NAMES, *Z_NAMES, "cross_entropy", "ce") if hasattr(returned, key)]
        pairs = [(key, getattr(returned, key)) for key in dict.fromkeys((*stored, *known))]
    else:
        return
    for key, value in pairs:
        if isinstance(value, (Mapping, tuple, list)) and not key.startswith("_"):
            yield from ((inner if key.startswith("item") else f"{key}.{inner}", x) for inner, x in _entries(value))
        else:
            yield key, value


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _reported(value: Any) -> Reported:
    if not isinstance(value, Tensor):
        return Reported(float(value), (), None, False)
    number = float(value.detach().double().reshape(())) if value.numel() == 1 else None
    return Reported(number, tuple(value.shape), value.dtype, value.requires_grad)


# The process and its errors.


@contextlib.contextmanager
def _process_restored(*, environment_too: bool = True) -> Iterator[None]:
    """Run user code and put the working directory, the environment and the standard streams back as they were.

    An imported module may set variables that its loss needs: `environment_too=False` keeps those.
    """
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


class _TimeIsUp(BaseException):
    """Not an `Exception`: code that catches those must not catch this one."""


@contextlib.contextmanager
def _limited(seconds: float | None, name: str) -> Iterator[None]:
    """An error if the block takes longer than `seconds`; None means no limit.

    The system's timer interrupts Python code, sleeping and waiting for locks. It needs the main thread; in other threads, and
    where the system has no such timer, there is no limit.
    """
    if not seconds or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _TimeIsUp:
        raise LossTimeoutError(
            f"{name} did not return within {seconds:g} seconds: it hangs, or needs a larger `time_limit` (0: none)."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _named_error(error: BaseException) -> str:
    """The kind of an error and the first line of its text; the failed line of code if it has none, such as a bare assert.

    Backticks become quotes: names between backticks are printed as flags, and these are not arguments of the audit.
    """
    kind, text = type(error).__name__, str(error).replace("`", "'").strip().splitlines()
    if text:
        return f"{kind}: {text[0][:300]}"
    at = traceback.extract_tb(error.__traceback__)[-1:]
    return kind + "".join(f" at `{x.line[:120]}` (line {x.lineno} of {Path(x.filename).name})" for x in at if x.line)


def _arguments_hint(function: Callable[..., Any], linear: bool, error: BaseException) -> str:
    """A forgotten or superfluous `linear`, read from the signature.

    A third parameter with a default lets the wrong call start, and torch then complains about shapes or dtypes.
    """
    places = [p for p in _parameters(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = sum(1 for p in places if p.default is p.empty)
    heads = ("hidden", "hidden_states", "weight", "lm_head", "lm_head_weight", "head")
    of_a_head = any(p.name.lower() in heads for p in places[:2])
    if isinstance(error, TypeError) and not linear and needed == 3:
        return " It needs three arguments: a loss of (hidden, weight, target) is audited with `linear=True`."
    if isinstance(error, TypeError) and linear and needed == len(places) == 2:
        return " It takes two arguments: a loss of (logits, target) is audited without `linear`."
    if linear and needed < 3 and len(places) > 1 and not of_a_head:
        return " Does it take (logits, target)? Then leave out `linear=True`."
    if not linear and len(places) >= 3 and of_a_head:
        return " Does it take (hidden, weight, target)? Then pass `linear=True`."
    return ""


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Empty for a function whose signature is not available."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def router_arguments(function: Callable[..., Any]) -> str | None:
    """The first two parameters in words where the second is a coefficient and none is a target, as in Megatron's
    `z_loss_func(logits, z_loss_coeff)`.
    """
    names = [parameter.name.lower() for parameter in _parameters(function)]
    targets = any(word in name for name in names for word in ("target", "label"))
    if len(names) < 2 or targets or not any(word in names[1] for word in ("coef", "lambda")):
        return None
    return f"({names[0]}, {names[1]})"


def _gpu_hint(error: BaseException, device: torch.device) -> str:
    """A sentence if the loss seems to want a GPU and the probes ran without one."""
    text = f"{type(error).__name__} {error}".lower()
    wants_gpu = any(word in text for word in ("cuda", "gpu", "triton", "nvidia", "active drivers"))
    if device.type == "cpu" and wants_gpu:
        return " The probes ran on the CPU, and this loss seems to want a GPU: run the audit on a machine that has one."
    return ""


# A loss by its name.

NEAR = 0.7
"""Minimum similarity of a suggested name: a file has many names, and some are similar by chance."""


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
            raise UnknownNameError(f"name in {module_name}", attribute, public[:40], alike=NEAR)
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
        with _process_restored(environment_too=False):
            folder = str(Path(name).resolve().parent) if name.endswith(".py") else os.getcwd()
            if folder not in sys.path:
                sys.path.insert(0, folder)
            return _from_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(
            f"cannot import {name!r} ({_named_error(error)}). Name a module that can be imported from here, or a file that ends "
            "in .py."
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
