"""Open, check, run and measure a package. Imports nothing from ``pipeline``, nor transformers' modelling code."""
