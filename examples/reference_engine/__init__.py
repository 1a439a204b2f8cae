"""A small transformer whose keys and values live in a pool's blocks alone, to prove that what is handed out is usable.

It is no engine: attention gathers pages request by request, in plain torch. Read `model` for the model, `runner` for a
rank's step, `step_link` for how schedulers reach the ranks, `generate` for all of it put together.
"""
