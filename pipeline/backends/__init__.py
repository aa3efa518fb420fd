"""One module a backend."""
