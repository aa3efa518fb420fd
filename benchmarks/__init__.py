"""This project and its peers, measured in turn on one machine: ``python -m benchmarks`` (docs/benchmarks.md).

What runs inside a peer's own environment (``benchmarks.engines``) imports nothing of this project but
``benchmarks.wire`` and its own folder: the libraries of the other modules are not there.
"""
