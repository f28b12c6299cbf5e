"""Replay of recorded routing through capacity policies: drops, costs, and the factors that a drop target needs.

Read in the order `policies.py` (what to try), `resharding.py` (who meets whom), `factors.py` (fates, by the transports'
own plan functions), `tally.py` and `replay.py` (counts), `cost.py`, `recommend.py` and `search.py` (which factors),
`study.py` (all of it), `results.py`, `tables.py` and `figure.py`. `check.py` holds a replay against what the run
counted. The command is `tools/replay.py`; traces are `ep_jax.traces`.
"""
