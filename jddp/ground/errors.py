"""The exit codes of jddp's commands, and its errors.

A mistake in a config, a batch, a file or a run raises one of these. The message has the value, the
rule and the way out, in one line; the command line prints that line and exits with `exit_code`.
Any other exception is a bug of jddp and keeps its traceback.
"""

import contextlib
import enum
import logging
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping


class ExitCode(enum.IntEnum):
    """The exit code of a command; docs/exit_codes.md has the same as a table.

    "Restarted" is the reaction of `jddp.launch --max-restarts`. A job that would fail again is not
    restarted (`DETERMINISTIC` in jddp/distributed/launcher.py).
    """

    # Done.
    DONE = 0
    # A bug, of jddp or of your code, with its traceback. Restarted.
    BUG = 1
    # Your command line, config or call. Not restarted.
    USAGE = 2
    # Your data: missing, damaged or changed. Not restarted.
    DATA = 65
    # The network or a host: processes that cannot connect, or have no device. Restarted.
    UNAVAILABLE = 69
    # The file system: full, forbidden, or with no sound checkpoint left. Restarted.
    FILE_SYSTEM = 74
    # A signal stopped the run, and it is saved. Not restarted: the same command resumes.
    PREEMPTED = 75
    # Hardware, or code that is not the same everywhere: replicas differ. Restarted.
    REPLICA_MISMATCH = 76
    # The job is too large for its devices. Not restarted.
    OUT_OF_MEMORY = 77
    # Processes were started with different code, configs or data. Not restarted.
    PROCESS_MISMATCH = 78
    # A process that makes no progress, in your code, the network or a device. Restarted.
    HANG = 79
    # A loss, gradient or state that is not finite. Not restarted.
    NUMERICS = 80
    # Another process failed first: its code decides, and the launcher returns it.
    ANOTHER_FAILED = 81
    # Ctrl-C (128 + SIGINT) where there was nothing to save. Restarted, unless the launcher was
    # interrupted too.
    INTERRUPTED = 130


class Error(Exception):
    """A mistake that you can fix; the command line exits with its `exit_code`.

    Any exception that ends a run, even in a callback or in the data, has an attribute `run`: the
    `jddp.Run` up to there, with its state and history.

    Args:
      message: The value, the rule and the way out.
      in_shell: Message for the command line, if the way out there is a flag or a key and not an
        argument of Python; by default `message`.
    """

    exit_code: int = ExitCode.USAGE

    def __init__(self, message: str = "", *, in_shell: str | None = None) -> None:
        super().__init__(message)
        self.in_shell = in_shell or message


class ConfigError(Error):
    """A config key, a value, or an argument of the public API breaks its rule."""


class UsageError(Error):
    """A call comes at the wrong time, or has an argument that its contract excludes."""


class DataError(Error):
    """Data is missing, truncated, altered or out of its range."""

    exit_code = ExitCode.DATA


class CoordinatorError(Error):
    """The processes of a job cannot connect: an address is wrong, taken or out of reach."""

    exit_code = ExitCode.UNAVAILABLE


class DeviceError(Error):
    """A process has no device to compute with."""

    exit_code = ExitCode.UNAVAILABLE


class FileSystemError(Error):
    """A directory or file cannot be read or written."""

    exit_code = ExitCode.FILE_SYSTEM


class ReplicaMismatchError(Error):
    """Replicas that must be identical are not: faulty hardware, or code that differs by host."""

    exit_code = ExitCode.REPLICA_MISMATCH


class OutOfMemoryError(Error):
    """A device has less memory than the step needs."""

    exit_code = ExitCode.OUT_OF_MEMORY


class ProcessMismatchError(Error):
    """Processes of one job were given different code, configs or data."""

    exit_code = ExitCode.PROCESS_MISMATCH


class NumericsError(Error):
    """A loss, gradient or state is not finite."""

    exit_code = ExitCode.NUMERICS


def refuse_differences(
    kind: str, subject: str, members: Iterable[tuple[str, Mapping[str, object]]]
) -> None:
    """Compares all members' values with the values of member 0.

    Args:
      kind: Name of a member: "process" or "node".
      subject: Common name of the values.
      members: Number of each member, perhaps with its place, and its values by name; 0 comes first.

    Raises:
      ProcessMismatchError: If a value differs.
    """
    (_, first), *others = members
    for member, other in others:
        if differ := [name for name in {**first, **other} if first.get(name) != other.get(name)]:
            there, here = (values.get(differ[0], "nothing") for values in (other, first))
            more = f", and {len(differ) - 1} more differ" if len(differ) > 1 else ""
            raise ProcessMismatchError(
                f"{kind} {member} has another {subject} than {kind} 0: {differ[0]} is {there} "
                f"there and {here} here{more}. Give every {kind} the same."
            )


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """Turns an error of the file system in its block into one of jddp, "`what`: reason.".

    Raises:
      FileSystemError: In the place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise FileSystemError(f"{what}: {words_of(error)}.") from error


def words_of(error: OSError) -> str:
    """The system's words for an error, without a path; its text or type if it has none."""
    return error.strerror or str(error) or type(error).__name__


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Refuses a value that is none of the choices.

    Raises:
      ConfigError: If the value is no choice; the message lists all choices.
    """
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ConfigError(f"{name} {value!r} is unknown. Choose one of {listed}.")


# Control characters, signs that turn the direction of writing, other ends of lines, and bytes of a
# file name that are no text. Some control characters are commands to a terminal. A tab stays.
_UNPRINTABLE = re.compile(r"[^\t -~\xa0-\u2027\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def printable(text: str) -> str:
    """The text in one line, with characters that are not to be printed as escapes of Python."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def warn_deprecated(name: str, *, since: str, instead: str) -> None:
    """Warns where a caller uses a public name that will go (docs/stability.md has the terms).

    Args:
      name: The function, argument, key or option, as its users write it.
      since: The version of jddp that deprecated it, such as "0.2".
      instead: The name to use in its place.
    """
    text = f"{name} is deprecated since jddp {since} and will be removed: use {instead}."
    warnings.warn(text, FutureWarning, stacklevel=3)


def printable_lines(text: str) -> str:
    """The text with each of its lines printable."""
    return "\n".join(map(printable, text.split("\n")))


def show(text: str) -> None:
    """Prints lines on standard output, printable: names in them may come from anywhere."""
    print(printable_lines(text), flush=True)


def report(text: str) -> None:
    """Prints lines on standard error, printable, after the name of jddp."""
    print(f"jddp: {printable_lines(text)}", file=sys.stderr, flush=True)


def _make_printable(record: logging.LogRecord) -> bool:
    record.msg = printable_lines(record.getMessage())
    record.args = ()
    return True


def log_printable() -> None:
    """Makes the lines of jddp's log printable: names in them may come from anywhere."""
    logging.getLogger("jddp").addFilter(_make_printable)  # A logger adds a filter only once.
