"""What a history raises."""


class Violation(AssertionError):
    """The engine broke a promise."""
