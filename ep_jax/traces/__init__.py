"""Routing traces: what routers chose, recorded once and replayed through any capacity policy.

`file.py` is the format, `recorder.py` writes it during training and evaluation, `megatron.py` and
`histogram.py` read other stacks' routing, `synthetic.py` makes labelled ones. Replaying is `ep_jax.replay`.
"""

from ep_jax.traces.file import Trace, TraceError, TraceHeader, TraceStep, write_step

__all__ = ["Trace", "TraceError", "TraceHeader", "TraceStep", "write_step"]
