"""The two errors a user meets. Each carries one message: what was wrong, the numbers, what to do. Imports nothing."""


class UserError(Exception):
    """The run file or an input is wrong; found before any work started. The command exits with 2."""

    exit_code = 2


class RunError(Exception):
    """Work that had started cannot go on. The command exits with 1."""

    exit_code = 1
