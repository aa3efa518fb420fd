"""The errors a user can cause, and the exit codes they end with."""


class UserError(ValueError):
    """Bad input: the message names the file, key or tensor, what was expected and what to do. Exit code 2."""

    exit_code = 2


class CheckFailedError(RuntimeError):
    """The package ran, and its output lies outside the limits that its configuration sets. Exit code 1."""

    exit_code = 1
