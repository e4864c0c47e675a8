"""`gradtap demo`: a small real training with one added line, recorded, checked and shown.

`launch` (the parent), `report`, `options`, `processes` and `data` know no torch.
`train` and `check` run as subprocesses, and do.
"""
