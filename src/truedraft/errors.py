"""What is refused, and what is only noted."""


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""


class NoRoom(Refused):
    """There is not the memory for so many rows or positions."""


class Note(UserWarning):
    """Something that a user should know of and that changes no result; the command line prints it on stderr."""


def reason(error: Exception) -> str:
    """Why something failed, in one line, without the number and the file that the system's errors carry."""
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(words.split()) or type(error).__name__
