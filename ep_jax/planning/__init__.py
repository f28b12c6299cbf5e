"""Plans memory, traffic and time of a configuration on named hardware, by formulas; no array and no device.

Reading order: hardware, sizes, memory, links, bounds, advice. `tools/plan.py` prints it.
"""
