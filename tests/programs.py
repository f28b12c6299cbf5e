"""Programs as text, for tests that count what runs."""

import re


def inlined(text: str) -> str:
    """The functions of a StableHLO module, each as often as it runs: a kernel is one, however many layers call it."""
    bodies = dict(re.findall(r"func\.func \w+ @(\w+)\((.*?)\n  }", text, flags=re.DOTALL))

    def body_of(name: str) -> str:
        return bodies[name] + "".join(map(body_of, re.findall(r"\bcall @(\w+)\(", bodies[name])))

    return body_of("main")
