"""Quantize weights before export: rows of schemes, and the code that applies them."""
