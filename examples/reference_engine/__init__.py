"""A small transformer that keeps its keys and values only in the blocks of a pool, to verify block contents end to end.

It is not a fast engine: attention gathers pages request by request in plain torch. See `model` for the model, `runner`
for a rank's step, `step_link` for the connection of schedulers to ranks, and `generate` for a complete run.
"""
