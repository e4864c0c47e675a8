"""`gradtap run`: records a training script that nobody edits.

`launch` is the parent: it starts the command and says what came of it. `site/sitecustomize.py` is what every Python
process of the command starts with. `hooks` and `attaching` work inside the training process.
"""
