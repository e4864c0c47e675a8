"""query: every question about a run, asked of one function each and answered in one form.

In: a `Run` and the options of the question, as the command line and HTTP give them. Out: an `Answer`, whose `body` is
both what `--json` prints and what the service sends, or a `Payload` of bytes.

Must not be known here: HTTP, a terminal, and how anything is stored.
"""
