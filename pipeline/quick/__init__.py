"""The same result with less repeated work: what the libraries of a build do again and again, done once.

Each module replaces something of a library for the length of a scope. Nothing here changes what a build makes.
One name stays after its scope: a module that is imported within ``quick_imports`` and takes ruamel's ``YAML`` by name,
as executorch's table of operators does, keeps the one of ``imports.py``.
"""
