"""Which errors ds_hydra raises, by who has to act on them."""


class HydraError(Exception):
    """Base of every error that ds_hydra raises on purpose."""


class HydraConfigError(HydraError, ValueError):
    """The configuration, or data it points to, must be edited. The message names the key and a
    value that works.
    """


class UnsupportedModelError(HydraConfigError):
    """The model (or a part of it) cannot be trained by ds_hydra; the message names the part and
    what works.
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
