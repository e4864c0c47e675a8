"""gradtap_server: what `gradtap.query` answers, over HTTP.

    settings, state -> app -> one router for each kind of question

In: folders of runs and an operator's settings. Out: JSON, arrays, problems, metrics. Every rule about HTTP is here and
none about gradients: a route turns a request into one query and its answer into a response.

Must not be known here: how anything is stored, and how a terminal shows it.
"""
