"""The error that a command reports as one sentence."""


class CliError(Exception):
    """Something the user can put right: shown without a traceback, exit code 2."""
