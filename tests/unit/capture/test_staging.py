"""Copies to host buffers: right bits, whole chunks, reused memory, waiting without hanging."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gradtap.capture.staging import Staging
from gradtap.errors import CaptureError
from gradtap.types import ArrayPlan, ChunkPlan, LocalGrad, ParamSpec, SessionPlan, StagedPiece

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _plan(*sizes: int, dtype: str = "float32", chunk: int = 4) -> tuple[SessionPlan, list[ChunkPlan]]:
    """A plan of one flat array for each size, cut into chunks of `chunk` elements, all owned by rank 0."""
    params, arrays, chunks = [], [], []
    for index, size in enumerate(sizes):
        params.append(ParamSpec(name=f"p{index}", shape=(size,), dtype=dtype))
        arrays.append(
            ArrayPlan(
                name=f"p{index}",
                param=index,
                start=0,
                stop=size,
                shape=(size,),
                dtype="float32",
                time=1,
                shard=(size,),
                chunk=(chunk,),
                owners=(0,),
            )
        )
        for start in range(0, size, chunk):
            chunks.append(
                ChunkPlan(
                    array=index,
                    column=(0,),
                    entry=start // chunk,
                    start=start,
                    stop=min(start + chunk, size),
                    numel=chunk,
                    owner=0,
                    slot=len(chunks),
                )
            )
    return SessionPlan(world=1, params=tuple(params), arrays=tuple(arrays)), chunks


def _grads(plan: SessionPlan) -> list[LocalGrad]:
    return [
        LocalGrad(
            param=index,
            start=0,
            stop=spec.numel,
            tensor=torch.randn(spec.numel, dtype=torch.float64).to(DTYPES[spec.dtype]),
        )
        for index, spec in enumerate(plan.params)
    ]


class Sink:
    """Keeps pieces, and gives them back at once unless told to hold them."""

    def __init__(self, hold: bool = False) -> None:
        self.pieces: list[StagedPiece] = []
        self.copies: list[np.ndarray[Any, Any]] = []
        self.held: list[Callable[[], None]] = []
        self.hold = hold

    def __call__(self, piece: StagedPiece, done: Callable[[], None]) -> None:
        if piece.ready is not None:
            piece.ready()
        self.pieces.append(piece)
        self.copies.append(piece.values.copy())
        if self.hold:
            self.held.append(done)
        else:
            done()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_pieces_have_the_gradients_bits(dtype: str) -> None:
    """Every element arrives once with its bits, bfloat16 as uint16, in runs that start and stop at chunk borders."""
    plan, chunks = _plan(10, 3, 1, dtype=dtype)
    grads, sink = _grads(plan), Sink()
    Staging(plan, chunks, budget=None, slab_bytes=1024).copy(grads, sink)
    for grad in grads:
        bits = grad.tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else grad.tensor.numpy()
        pieces = [
            (piece, values) for piece, values in zip(sink.pieces, sink.copies, strict=True) if piece.param == grad.param
        ]
        np.testing.assert_array_equal(np.concatenate([values for _, values in pieces]), bits)
        assert all(values.dtype == bits.dtype and len(values) == piece.stop - piece.start for piece, values in pieces)
    borders = {(chunk.array, chunk.start) for chunk in chunks}
    assert all((piece.param, piece.start) in borders for piece in sink.pieces)


def test_a_missing_gradient_is_zeros() -> None:
    """A parameter without gradient arrives as zeros, also in memory that held another value before."""
    plan, chunks = _plan(6)
    staging, sink = Staging(plan, chunks, budget=0, slab_bytes=64), Sink()
    for _ in range(4):
        staging.copy(_grads(plan), sink)
    sink.copies.clear()
    staging.copy([LocalGrad(param=0, start=0, stop=6, tensor=None)], sink)
    assert np.concatenate(sink.copies).tolist() == [0.0] * 6


def test_a_run_is_put_together_from_several_local_gradients() -> None:
    """One chunk that lies over two of the engine's fragments is filled from both."""
    plan, chunks = _plan(8, chunk=8)
    values, sink = torch.arange(8.0), Sink()
    parts = [LocalGrad(param=0, start=a, stop=b, tensor=values[a:b]) for a, b in ((0, 3), (3, 8))]
    Staging(plan, chunks, budget=None, slab_bytes=64).copy(parts, sink)
    assert sink.copies[0].tolist() == values.tolist()


def test_only_the_ranks_own_chunks_are_copied() -> None:
    """Of a whole replicated gradient only the chunks in the rank's plan are taken."""
    plan, chunks = _plan(12)
    sink = Sink()
    staging = Staging(plan, [chunks[0], chunks[2]], budget=None, slab_bytes=1024)
    staging.copy(_grads(plan), sink)
    assert [(piece.start, piece.stop) for piece in sink.pieces] == [(0, 4), (8, 12)]
    assert staging.step_bytes == 8 * 4


def test_what_is_not_wanted_is_left_out() -> None:
    """Parameters outside the selection are neither copied nor handed on, and need no gradient."""
    plan, chunks = _plan(4, 4, 4)
    sink = Sink()
    staging = Staging(plan, chunks, budget=None, slab_bytes=1024)
    staging.copy(_grads(plan)[1:2], sink, wanted=lambda param: param == 1)
    assert [piece.param for piece in sink.pieces] == [1]


def test_memory_is_reused_and_bounded() -> None:
    """Many steps through a small budget touch no more memory than two slabs, and `room` comes back each time."""
    plan, chunks = _plan(16)
    staging, sink = Staging(plan, chunks, budget=1, slab_bytes=64), Sink()
    for _ in range(20):
        assert staging.room()
        staging.copy(_grads(plan), sink)
    slabs = {piece.values.__array_interface__["data"][0] // 64 for piece in sink.pieces}
    assert len(slabs) <= 2
    assert staging.budget == 2 * staging.slab_bytes


def test_a_slab_is_free_when_all_its_pieces_are_done() -> None:
    """Two pieces in one slab: after one is done (told twice) there is no room yet, after both there is."""
    plan, chunks = _plan(8, 8)
    staging, sink = Staging(plan, chunks, budget=0, slab_bytes=128), Sink(hold=True)
    staging.copy(_grads(plan), sink)
    staging.copy(_grads(plan), sink)
    assert len(sink.held) == 4 and not staging.room()
    sink.held[0]()
    sink.held[0]()
    assert not staging.room()
    sink.held[1]()
    assert staging.room()


def test_pieces_are_not_overwritten_before_they_are_done() -> None:
    """Values handed on stay as they were while later steps go through the other slabs."""
    plan, chunks = _plan(16)
    staging, sink = Staging(plan, chunks, budget=4 * 64, slab_bytes=64), Sink(hold=True)
    staging.copy(_grads(plan), sink)
    sink.hold = False
    for _ in range(8):
        staging.copy(_grads(plan), sink)
    np.testing.assert_array_equal(sink.pieces[0].values, sink.copies[0])


def test_a_step_larger_than_the_buffer_streams_through_while_training_waits() -> None:
    """With two slabs and a slow consumer in another thread a step of many slabs arrives whole, and the wait is told."""
    plan, chunks = _plan(160)
    staging = Staging(plan, chunks, budget=0, slab_bytes=64)
    assert not staging.fits and not staging.room()
    grads, seen = _grads(plan), []

    def sink(piece: StagedPiece, done: Callable[[], None]) -> None:
        def finish() -> None:
            seen.append(piece.values.copy())
            done()

        threading.Timer(0.01 * (len(seen) % 2 + 1), finish).start()

    waited = staging.copy(grads, sink)
    deadline = time.monotonic() + 5
    while sum(map(len, seen)) < 160 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sorted(np.concatenate(seen)) == sorted(grads[0].tensor.tolist())
    assert waited > 0


def test_abort_wakes_a_waiting_copy() -> None:
    """When the consumer is gone a copy that waits for memory ends in `CaptureError` with the reason, not in a hang."""
    plan, chunks = _plan(64)
    staging = Staging(plan, chunks, budget=0, slab_bytes=64)
    threading.Timer(0.05, staging.abort, args=("the writer died: disk full",)).start()
    with pytest.raises(CaptureError, match="disk full"):
        staging.copy(_grads(plan), Sink(hold=True))
    with pytest.raises(CaptureError, match="disk full"):
        staging.copy(_grads(plan), Sink())


def test_close_lets_a_waiting_copy_go() -> None:
    """`close` ends a waiting copy too, and pieces handed on before stay readable."""
    plan, chunks = _plan(64)
    staging, sink = Staging(plan, chunks, budget=0, slab_bytes=64), Sink(hold=True)
    threading.Timer(0.05, staging.close).start()
    with pytest.raises(CaptureError, match="closed"):
        staging.copy(_grads(plan), sink)
    np.testing.assert_array_equal(sink.pieces[0].values, sink.copies[0])


def test_a_sink_that_fails_loses_no_memory() -> None:
    """When handing on raises, the slab under way is given back with the pieces' own `done`."""
    plan, chunks = _plan(16)
    staging = Staging(plan, chunks, budget=0, slab_bytes=64)

    def broken(piece: StagedPiece, done: Callable[[], None]) -> None:
        done()
        raise RuntimeError("no")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="no"):
            staging.copy(_grads(plan), broken)
    assert staging.room()


def test_a_chunk_larger_than_a_slab_gets_a_larger_slab() -> None:
    """A slab is never smaller than the largest chunk, which is never split."""
    plan, chunks = _plan(1000, chunk=1000)
    staging, sink = Staging(plan, chunks, budget=0, slab_bytes=64), Sink()
    staging.copy(_grads(plan), sink)
    assert [(piece.start, piece.stop) for piece in sink.pieces] == [(0, 1000)]
    assert staging.slab_bytes >= 4000


def test_missing_elements_are_an_error() -> None:
    """Gradients that do not cover a chunk raise with the parameter's name, and are never filled up."""
    plan, chunks = _plan(8)
    short = [LocalGrad(param=0, start=0, stop=6, tensor=torch.zeros(6))]
    with pytest.raises(CaptureError, match="up to 6 of p0"):
        Staging(plan, chunks, budget=None, slab_bytes=1024).copy(short, Sink())


def test_another_dtype_than_at_attach_is_an_error() -> None:
    """A gradient that changed its dtype after attach raises: copying would convert it silently."""
    plan, chunks = _plan(4)
    with pytest.raises(CaptureError, match="p0 is torch.float16, but was float32"):
        changed = [LocalGrad(param=0, start=0, stop=4, tensor=torch.zeros(4, dtype=torch.float16))]
        Staging(plan, chunks, budget=None, slab_bytes=1024).copy(changed, Sink())


def test_the_default_budget_holds_two_steps() -> None:
    """Without a budget the slabs can hold two small steps, at least 64 MiB where memory allows; none is made yet."""
    plan, chunks = _plan(100)
    staging = Staging(plan, chunks, budget=None, slab_bytes=2**20)
    assert 2 * 2**20 <= staging.budget <= 64 * 2**20
    assert staging.fits and staging.room()


@pytest.mark.gpu
def test_gpu_copies_are_ordered_before_the_step_and_told_ready() -> None:
    """On a GPU values are those before an in-place change queued right after the copy, once `ready` has returned."""
    plan, chunks = _plan(2**20, chunk=2**16)
    staging, sink = Staging(plan, chunks, budget=None, slab_bytes=2**20), []
    for _ in range(5):
        source = torch.randn(2**20, device="cuda")
        expected = source.clone()
        sink.clear()
        staging.copy(
            [LocalGrad(param=0, start=0, stop=2**20, tensor=source)], lambda piece, done: sink.append((piece, done))
        )
        source.mul_(0.0)
        for piece, done in sink:
            assert piece.ready is not None
            piece.ready()
            np.testing.assert_array_equal(piece.values, expected[piece.start : piece.stop].cpu().numpy())
            done()


@pytest.mark.gpu
def test_gpu_gradients_of_a_torch_optimizer_are_captured() -> None:
    """The whole way on a GPU: source, pinned staging and values equal to the gradient before the optimizer's step."""
    from gradtap.capture.detect import find_source

    model = torch.nn.Linear(300, 200).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    source = find_source((model, optimizer))
    plan, chunks = _plan(60_000, 200, chunk=4096)
    staging, sink = Staging(plan, chunks, budget=None, slab_bytes=2**17), Sink(hold=True)
    taken = []

    class Listener:
        def before_step(self) -> None:
            staging.copy(source.gradients(), lambda piece, done: taken.append((piece, done)))

        def after_step(self) -> None:
            pass

    source.install(Listener())
    model(torch.randn(8, 300, device="cuda")).square().sum().backward()
    expected = [param.grad.reshape(-1).cpu().numpy() for param in model.parameters() if param.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    for piece, done in taken:
        sink(piece, done)
        np.testing.assert_array_equal(piece.values, expected[piece.param][piece.start : piece.stop])
    assert sum(len(piece.values) for piece, _ in taken) == 60_200
