"""`python -m jddp` prints the commands, and exits with 2, as no command was given."""

import sys

from jddp.errors import ExitCode

COMMANDS = """\
python -m jddp.train       train a model from a config
python -m jddp.launch      start the processes of a job, on one host or several
python -m jddp.verify      compare a step on all devices with one on a single device
python -m jddp.doctor      check this host, or this job, before training
python -m jddp.checkpoint  list, verify, export and import checkpoints
python -m jddp.data        write token files
Each has --help. Start with: python -m jddp.train train.num_steps=20 run.dir=runs/try"""

if __name__ == "__main__":
    print(COMMANDS)
    sys.exit(ExitCode.DONE if sys.argv[1:] in (["-h"], ["--help"]) else ExitCode.USAGE)
