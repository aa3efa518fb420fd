"""Build a package: load, quantize, register, export, lower, emit, package (the order is in ``build.py``)."""

__version__ = "0.1.0"
