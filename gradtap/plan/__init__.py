"""Which rank writes which bytes, and which step gets which capture number. Pure functions of what all ranks know.

Comes in: parameter specs, ownership at the step boundary, world size, settings; rules and schedule entries.
Goes out: a `SessionPlan`, its chunks by array or by rank, its JSON; a `Schedule`.
Must not be known here: files, Zarr, tensors, codecs, engines, time. Same input, same output, on every rank.
"""
