"""The model zoo: every family of models that the pipeline is held to, built and run with small random weights."""
