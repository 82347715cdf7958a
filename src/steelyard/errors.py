"""The errors a user meets as one line: a request that cannot be carried out as it was made, a lost answer, a bad network."""


class RequestError(Exception):
    """One line: the value, what is allowed, the next step. The command ends with exit code 2 and leaves no record."""


class LostError(Exception):
    """The work was done and its answer has nowhere to go: a full disk, say. The command ends with exit code 1."""


class ExchangeError(Exception):
    """Ranks cannot exchange what they must: the sum of an all-reduce is wrong."""
