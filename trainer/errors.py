"""What ends the trainer early, and the exit code each means.

    TrainerError        1   training could not go on
    └── InputError      2   an option or variable is wrong; found before anything was touched

Each message is a sentence or two: what happened, where, and what to do. They are shown without a traceback.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Training could not go on, for a reason outside this code."""

    exit_code = 1


class InputError(TrainerError):
    """An option or an environment variable is wrong."""

    exit_code = 2
