"""The command line: a thin translation of `read`, `verify` and `demo` into text.

In: words of a shell. Out: data on stdout, messages and progress on stderr, one exit code.
Knows nothing of torch or of how a store is laid out; the heavy packages load when a verb runs, not before.
"""
