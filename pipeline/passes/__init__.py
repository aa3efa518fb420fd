"""Graph passes over an exported program, one module a pass."""
