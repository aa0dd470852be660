"""What was trained, by version, over HTTP: `manyhands export` writes a version, `manyhands serve` answers from them.

source → stream → manager → loader → servable ← batcher ← HTTP. The first five and the core know nothing of torch: the
process that speaks HTTP never loads it, and models run in processes of their own.
"""
