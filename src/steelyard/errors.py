"""The one error that is the user's: a request that cannot be carried out as it was made."""


class RequestError(Exception):
    """One line: the value, what is allowed, the next step. The command ends with exit code 2 and leaves no record."""
