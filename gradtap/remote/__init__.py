"""remote: the questions of `gradtap.query`, asked of a gradtap server over HTTP.

In: the address of a server and the words of a question. Out: the answers, gradients and errors that a folder gives.

Must not be known here: how the server makes its answers, how anything is stored, a terminal.
"""
