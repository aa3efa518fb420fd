"""One module an engine: what a worker process runs, in the engine's own environment."""
