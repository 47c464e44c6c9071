"""`headrace bench`: load from outside, measured as a user feels it.

Not here: what a token costs in the gateway's process, for which `benchmarks/` looks from within.
"""
