"""What is refused, and what is only noted."""


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not the memory for so many rows or positions."""


class Note(UserWarning):
    """Something that a user should know of and that changes no result; the command line prints it on stderr."""
