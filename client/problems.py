"""What the command says when it cannot do what was asked: one sentence and a way out, no traceback."""


class CannotRun(Exception):
    """The message is shown as it is, after the program's name."""
