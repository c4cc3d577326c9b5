"""The one exception of the house."""


class Refused(ValueError):
    """A setting that cannot be honoured exactly; the message names the argument, its value and the remedy."""
