"""The values that cross a border between two stages, all frozen.

    LocalGrad -> StagedPiece -> EncodedChunk -> StepFacts/StepOutcome -> GradSlice

Nothing here reads a file, holds a tensor or knows an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

ParamStatus = Literal["captured", "frozen", "unoptimized"]
OwnershipKind = Literal["whole", "replicated", "rows", "flat", "cuts", "boxes"]
Box = tuple[tuple[int, int], ...]
"""An n-d block of a parameter: start and stop along each axis."""

StepState = Literal["unknown", "applied", "skipped-overflow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the model, in model order.

    `dtype` is that of the gradient buffer as captured: "float32", "bfloat16", "float16" or "float64".
    `status` says why a parameter has no stored gradient: "frozen" (no gradient is asked for) or
    "unoptimized" (trainable, but in no parameter group of the optimizer).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    status: ParamStatus = "captured"
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def stored(self) -> bool:
        """Whether the plan has arrays for it: captured, and not of size zero."""
        return self.status == "captured" and self.numel > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Which rank holds which elements of one parameter at the step boundary.

    Elements are counted in row-major (C) order.

    - "whole": `ranks == (r,)`.
    - "replicated": every rank of `ranks` holds all of it.
    - "rows": dim 0 in equal blocks of `ceil(d0 / len(ranks))` rows (torch.chunk); trailing ranks may be empty.
    - "flat": equal flat ranges of `ceil(numel / len(ranks))` elements; trailing ranks may be empty.
    - "cuts": `ranks[i]` holds elements `bounds[i]` to `bounds[i + 1]`; `bounds[0] == 0`, `bounds[-1] == numel`.
    - "boxes": `ranks[i]` holds the n-d block `boxes[i]`; on each axis all blocks start at multiples of one extent.
    """

    kind: OwnershipKind
    ranks: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    boxes: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """One Zarr array of gradients: a parameter, or one owner's piece of it. Axis 0 (captures) is left out.

    `shape`, `shard` and `chunk` have the same length (0 for a scalar). `chunk` divides `shard` exactly.
    Every chunk that meets `shape` covers a contiguous flat range of the parameter, then padding.
    """

    name: str
    param: int
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: Literal["float32", "float64"]
    time: int
    shard: tuple[int, ...]
    chunk: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def columns(self) -> tuple[int, ...]:
        """Shard columns along each axis of `shape`."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard, strict=True))

    @property
    def shard_chunks(self) -> tuple[int, ...]:
        """Inner chunks along each axis of one shard column."""
        return tuple(s // c for s, c in zip(self.shard, self.chunk, strict=True))

    @property
    def entries(self) -> int:
        """Index entries of one capture in one shard file."""
        return math.prod(self.shard_chunks)

    @property
    def chunk_numel(self) -> int:
        """Elements of one inner chunk, padding included."""
        return math.prod(self.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """One inner chunk of one capture: where it lies in the store and which elements it holds."""

    array: int
    column: tuple[int, ...]
    entry: int
    start: int
    stop: int
    numel: int
    owner: int
    slot: int

    # array:  index into SessionPlan.arrays
    # column: shard column, the numbers of the chunk key after the capture axis
    # entry:  position within the capture's entries of that shard column
    # start, stop: flat range of the *parameter* that it holds
    # numel:  elements encoded, padding included (numel >= stop - start)
    # slot:   position among the owner's chunks: index of its checksum in the owner's journal record


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """Everything that ranks must agree on: parameters, arrays, and one writer for each shard column."""

    world: int
    params: tuple[ParamSpec, ...]
    arrays: tuple[ArrayPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRange:
    """A contiguous block of one parameter that one rank writes. Elements in row-major order."""

    param: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGrad:
    """What this rank holds of one parameter at the boundary: a 1-D tensor of `stop - start` elements.

    `tensor` is a torch tensor, or None where the engine has no gradient (`grad is None`): read as zeros.
    """

    param: int
    start: int
    stop: int
    tensor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPiece:
    """A run of whole chunks of one piece in host memory, ready to encode.

    `values` is a 1-D array of the captured dtype (bfloat16 as uint16 bits), still times the loss scale.
    It covers elements `start` to `stop` of parameter `param`; `start` is a chunk's start, `stop` a chunk's stop.
    `ready`, where there is one, must be called (from any thread) before `values` is read: a device still writes it.
    """

    param: int
    start: int
    stop: int
    values: NDArray[Any]
    ready: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedChunk:
    """Stored bytes of one chunk: body and its crc32c (little endian) at the end; `crc` is that of the body."""

    data: bytes
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step before the optimizer moves: one ledger row, less what only the store can fill in.

    `k`: stored value = engine's bits x 2**-k. `factor`: stored value x factor = the gradient as defined.
    `touched[p]`: micro-batch of the window (from 0) whose backward first reached parameter p, -1 for none.
    """

    step: int
    time: float
    k: int
    factor: float
    loss_scale: float
    micro_seen: int
    accum_engine: int
    accum_loop: int
    divisor: float
    clip_limit: float
    learning_rates: tuple[float, ...]
    touched: NDArray[np.int32]
    flags: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What is known only after the optimizer has moved. NaN where the engine does not say."""

    state: StepState
    norm_engine: float = math.nan
    clip_coef: float = math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a session says about its engine, for people and for `session.json`."""

    name: str
    rank: int
    world: int
    groups: int
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class GradSlice(np.lib.mixins.NDArrayOperatorsMixin):
    """One gradient, a slice of it, or a stack over steps, with what is known about it.

    Behaves as its `values` in NumPy expressions; `numpy.asarray(g)` and `torch.from_dlpack(g)` take no copy.
    `values` is float32 (float64 for a float64 gradient); `dtype_captured` is the engine's own dtype. `consumed` is None
    for values as they are stored; else what these were multiplied with, step by step, to be as the optimizer consumed.
    """

    values: NDArray[Any]
    name: str
    steps: tuple[int, ...]
    attempts: tuple[int, ...]
    dtype_captured: str
    complete: bool
    flags: tuple[str, ...]
    factor: tuple[float, ...]
    consumed: tuple[float, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `values`."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of `values`."""
        return self.values.dtype

    @property
    def step(self) -> int:
        """The step, where there is one; the first of a stack."""
        return self.steps[0]

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.steps[:3])) + (", ..." if len(self.steps) > 3 else "")
        notes = [f"captured as {self.dtype_captured}", *self.flags, *([] if self.complete else ["not complete"])]
        notes += [] if self.consumed is None else ["as consumed"]
        return f"<gradient of {self.name} at step {shown}: {', '.join(notes)}>\n{self.values!r}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.values, dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x.values if isinstance(x, GradSlice) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]

    def __len__(self) -> int:
        return len(self.values)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.values.__dlpack_device__()


Report = Callable[[str], None]
"""Says one message to the user, once (a warning, or an error under `on_error="raise"`)."""
