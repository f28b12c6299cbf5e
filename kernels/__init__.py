"""GPU kernels of ep_jax, one operation a folder; imported as `ep_jax_kernels` (`kernels` belongs to another package).

Each folder has kernel.py (Triton bodies that import only triton), op.py (the JAX side: checks, launch, derivative) and
reference.py (the same in plain JAX). Nothing here imports triton or jax-triton before a kernel is called, and nothing
here knows of ep_jax, transports or routes. `call.py` is the only file that meets jax-triton; `tune.py` times launches.
"""
