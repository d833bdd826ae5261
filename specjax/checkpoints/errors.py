"""What is raised where a checkpoint cannot be read."""

_SHOWN = 300


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or not what its configuration says.

    Of a long sentence, as files can make it, the first and the last words are kept.
    """

    def __init__(self, message: str) -> None:
        short = len(message) <= 2 * _SHOWN
        super().__init__(message if short else f"{message[:_SHOWN]} ... {message[-_SHOWN:]}")
