"""How a run that has begun can fail."""


class TrainingFailure(Exception):
    """The run cannot go on: one line that says why and what remains. Exit status 1."""
