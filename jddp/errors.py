"""The errors that jddp raises for a user's mistake, each with its exit code.

Whatever is wrong with a config, a batch, a file or a run leaves jddp as one of these. The message
names the value, the rule and the way out, in one line; the command line prints that line and exits
with `exit_code`. Any other exception is a bug of jddp's own and keeps its traceback.
"""


class Error(Exception):
    """A mistake that the user can mend. `exit_code` is what the command line returns for it."""

    exit_code = 2


class ConfigError(Error):
    """A config key, a value, or an argument of the public API breaks its rule."""


class UsageError(Error):
    """A call is out of order, or given something that its contract excludes."""


class DataError(Error):
    """Data is missing, truncated, altered or out of its range."""

    exit_code = 65


class CoordinatorError(Error):
    """The processes of a job cannot meet: an address that is wrong, taken or out of reach."""

    exit_code = 69


class DeviceError(Error):
    """A process has no device to compute with."""

    exit_code = 69


class FileSystemError(Error):
    """A directory or file cannot be read or written."""

    exit_code = 74


class DivergenceError(Error):
    """Replicas that have to be alike are not: hardware that errs, or code that differs by host."""

    exit_code = 76


class OutOfMemoryError(Error):
    """A device has less memory than the step needs."""

    exit_code = 77


class DisagreementError(Error):
    """Processes of one job were given different code, configs or data."""

    exit_code = 78


class NumericsError(Error):
    """Numbers went wrong: a loss that is not finite."""

    exit_code = 80
