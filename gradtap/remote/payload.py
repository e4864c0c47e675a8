"""A gradient as the bytes of a file, as a server sent them: checked for their length, and passed on."""

from __future__ import annotations

from gradtap.errors import StoreError
from gradtap.query.formats import MEDIA_TYPES, GradHead, Payload, length_of, resolved_dtype
from gradtap.remote.arrays import ArrayFacts
from gradtap.remote.client import Reply
from gradtap.remote.problems import stranger


def payload_of(facts: ArrayFacts, reply: Reply, *, format: str, dtype: str, slice: str) -> Payload:
    """The payload over the body of an answer; `format`, `dtype` and `slice` are what was asked for.

    Raises `StoreError` for a body of another length than its format and shape make, or of another format.
    """
    assert facts.steps is not None and facts.attempts is not None and facts.factor is not None
    media = reply.headers.get("content-type", "").partition(";")[0].strip()
    if media != MEDIA_TYPES.get(format):
        raise stranger(reply.url, f"it answered {media or 'nothing'} where {format} was asked for")
    head = GradHead(
        run=facts.run,
        name=facts.name,
        shape=facts.shape,
        dtype="float64" if "float64" in facts.dtype_captured else "float32",
        dtype_captured=facts.dtype_captured,
        steps=facts.steps,
        attempts=facts.attempts,
        flags=facts.flags,
        factor=facts.factor,
        complete=facts.complete,
        stacked=facts.stacked,
        slice=slice,
        consumed=facts.consumed,
    )
    if facts.dtype != (asked := resolved_dtype(head, format=format, dtype=dtype)):
        raise stranger(reply.url, f"it sent {facts.dtype} where {asked} was asked for")
    # The header of safetensors says more than the HTTP headers do; of the others the length is known to the byte.
    wanted = length_of(head, format=format, dtype=dtype) if format in ("raw", "npy") else None
    if wanted is not None and len(reply.body) != wanted:
        raise StoreError(f"the answer of {reply.url} has {len(reply.body)} bytes where {wanted} belong; ask again")
    return Payload(
        format=format,
        media_type=media,
        dtype=facts.dtype,
        head=head,
        parts=(memoryview(reply.body),),
        rounded=facts.rounded,
    )
