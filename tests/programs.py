"""Programs as text, for tests that count what runs."""

import re

import jax
import jax.numpy as jnp


def inlined(text: str) -> str:
    """The functions of a StableHLO module, each as often as it runs: a kernel is one, however many layers call it."""
    bodies = dict(re.findall(r"func\.func \w+ @(\w+)\((.*?)\n  }", text, flags=re.DOTALL))

    def body_of(name: str) -> str:
        return bodies[name] + "".join(map(body_of, re.findall(r"\bcall @(\w+)\(", bodies[name])))

    return body_of("main")


def float_scatter_adds(jaxpr) -> list:
    """Every scatter-add of floats, rows or single numbers, in a jaxpr and all that it contains."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scatter-add" and jnp.issubdtype(equation.invars[2].aval.dtype, jnp.floating):
            found.append(equation)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                found += float_scatter_adds(inner)
    return found
