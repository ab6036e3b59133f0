"""What importing jddp leaves as it was: hooks, handlers, filters and variables of the process."""

import json
import subprocess
import sys

from house import DOORS, MODULES, name_of

# Names of those that call, at import, a function that changes the process; printed as JSON.
PROGRAM = """
import atexit, faulthandler, importlib, json, logging, os, signal, sys, threading, warnings

# Libraries first: what they do when they are imported is theirs.
import flax, fsspec, jax, omegaconf, optax, orbax.checkpoint, pydantic, rich, safetensors.numpy
try:
    import ray.train.collective, ray.train.v2.jax
except ImportError:
    pass

calls = []


def noting(function):
    def noted(*args, **kwargs):
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.partition(".")[0] == "jddp":
            calls.append(f"{caller}: {function.__name__}")
        return function(*args, **kwargs)

    return noted


for module, names in (
    (atexit, ["register"]),
    (faulthandler, ["enable", "register"]),
    (logging, ["basicConfig", "captureWarnings", "disable", "addLevelName"]),
    (os, ["chdir", "putenv", "register_at_fork", "umask"]),
    (signal, ["pthread_sigmask", "set_wakeup_fd", "setitimer", "signal"]),
    (sys, ["setrecursionlimit", "settrace", "setswitchinterval"]),
    (threading, ["_register_atexit", "excepthook"]),
    (warnings, ["filterwarnings", "simplefilter"]),
):
    for name in names:
        setattr(module, name, noting(getattr(module, name)))


def state():
    loggers = {"root": logging.root} | {
        name: found
        for name, found in logging.root.manager.loggerDict.items()
        if isinstance(found, logging.Logger) and name.partition(".")[0] != "jddp"
    }
    return {
        "hooks": [str(x) for x in (sys.excepthook, sys.unraisablehook, threading.excepthook)],
        "handlers": [str(signal.getsignal(x)) for x in signal.valid_signals()],
        "warnings": [str(x) for x in warnings.filters],
        "variables": dict(os.environ),
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": [str(x) for x in (sys.stdin, sys.stdout, sys.stderr)],
        "options of JAX": {name: str(x) for name, x in jax.config.values.items()},
        "threads": [x.name for x in threading.enumerate()],
        "loggers": {
            name: [str(x) for x in (*found.filters, *found.handlers, found.level, found.propagate)]
            for name, found in loggers.items()
        },
    }


before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
for name in after["loggers"].keys() - before["loggers"].keys():
    before["loggers"][name] = ["0", "True"]  # as a new one is
changed = [name for name in before if before[name] != after[name]]
print(json.dumps([calls, changed]))
"""


def test_no_module_changes_the_process_when_it_is_imported():
    names = [name_of(path) for path in {*MODULES} - DOORS]
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    calls, changed = json.loads(done.stdout.splitlines()[-1])
    assert (calls, changed) == ([], [])
