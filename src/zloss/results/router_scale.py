"""What a router coefficient means under every convention: the result of `zloss router-scale`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from zloss.errors import InputError
from zloss.results.record import from_plain, to_plain
from zloss.results.schema import without_schema
from zloss.results.writing import result_file, write_json


@dataclass(frozen=True)
class ConventionScale:
    """The coefficient under one convention. Scaling: per routing decision."""

    convention: str
    """Name of the convention."""
    relative: float
    """s_rel against the token-layer mean; the mean over decisions where layers differ."""
    absolute: float
    """λ_R·α of one decision."""
    uniform: bool
    """Whether every layer has the same scale."""
    equal_coef: float | None
    """The coefficient that applies here what `coef` applies under `source`; None where nothing is applied."""
    cited: str
    """Where the convention was read."""


@dataclass(frozen=True)
class RouterScaleTable:
    """One coefficient under every known convention."""

    SCHEMA: ClassVar[str] = "zloss.router-scale/1"

    coef: float
    """λ_R as configured."""
    source: str
    """The convention in which `coef` is meant."""
    layers: int
    """Routers, L."""
    top_k: int
    """Experts per token, k."""
    tokens: int
    """Tokens per layer and batch."""
    conventions: tuple[ConventionScale, ...]
    """Every known convention."""
    model_layers: int | None = None
    """Blocks of the model, dense ones included; None for `layers`."""
    encoder_layers: int | None = None
    """Routers of the encoder; None without one."""
    valid_tokens: int | None = None
    """Tokens with a label; None for all."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def __post_init__(self) -> None:
        if self.source not in {scale.convention for scale in self.conventions}:
            raise InputError(f"`source` is {self.source!r}, which is none of `conventions`.")

    def scale(self, convention: str) -> ConventionScale:
        """That of one convention."""
        return next(scale for scale in self.conventions if scale.convention == convention)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": self.SCHEMA, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any) -> RouterScaleTable:
        """The table of a parsed file."""
        return from_plain(cls, without_schema(data, cls.SCHEMA))

    def write(self, out: str | Path) -> Path:
        """Write the file `out`, or `router_scale.json` in the folder `out`, and return its path."""
        path = result_file(out, "router_scale.json")
        write_json(path, self.to_dict())
        return path
