"""The page of `manyhands dash`: what the runs of a directory do, live, and the whole job without a command.

    records     buckets.py, worker_times.py, run_view.py    a run in bounded memory, however long it is
    runs        run_list.py, followed.py                    which runs there are; reading those that are looked at
    the page    app.py, pushing.py, static/                    answers and pushes; what a browser shows
    doors       gatekeeper.py, connection_limits.py              who may ask, decided in one place
    the job     choices.py, own_runs.py, torch_child.py     what can be chosen; runs that the page has started

What displays only reads. A run that is started here is `manyhands train` in a process of its own, and nothing in this
process imports torch.
"""
