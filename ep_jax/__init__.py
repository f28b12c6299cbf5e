"""ep_jax: a JAX/XLA training stack for fixed-capacity expert parallelism.

Importing this package imports nothing heavy; the protocol is `ep_jax.ep`, the commands are `ep_jax.train` and
`ep_jax.evaluate`.
"""

__version__ = "0.1.0"
