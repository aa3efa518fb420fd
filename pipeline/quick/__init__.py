"""The same result with less repeated work: what the libraries of a build do again and again, done once.

Each module replaces something of a library for the length of a scope. Nothing here changes what a build makes.
"""
