"""What is refused."""


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not the memory for so many rows or positions."""
