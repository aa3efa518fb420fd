"""Scripts that make a peer's model once, in an environment of their own: each a module with arguments."""
