"""Errors of ds_hydra, by who has to act on them."""

_MAX_CHARACTERS = 4000


class HydraError(Exception):
    """Base of every error that ds_hydra raises on purpose.

    A message can be printed and sent whatever values it names: the middle of a long one is left
    out, and halves of surrogate pairs are escaped.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_printable(arg) if isinstance(arg, str) else arg for arg in args))


def _printable(text: str) -> str:
    if len(text) > _MAX_CHARACTERS:
        # What is wrong stands at the beginning, what to do at the end.
        half = _MAX_CHARACTERS // 2 - 20
        left_out = len(text) - 2 * half
        text = f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class HydraConfigError(HydraError, ValueError):
    """The configuration, or data it points to, must be edited. The message names the key and a
    value that works.
    """


class UnsupportedModelError(HydraConfigError):
    """The model (or a part of it) cannot be trained by ds_hydra; the message names the part and a
    remedy.
    """


class HydraDataError(HydraError, ValueError):
    """A sequence of the training data cannot be read; the message names its row."""


class InfeasiblePlanError(HydraError, ValueError):
    """The input is valid but no plan exists, for example a sequence longer than any pipeline can
    hold.
    """


class PlanMismatchError(HydraError, RuntimeError):
    """Ranks hold different plans for one iteration, or have called different methods of an engine.
    No gradient was exchanged, no weight changed.
    """


class CheckpointError(HydraError, RuntimeError):
    """A checkpoint could not be written, or must not be read; the message names the file and the
    reason.
    """


class RankLostError(HydraError, RuntimeError):
    """Another rank ended, failed or fell silent; the message names it. This process cannot train
    on: restart.
    """
