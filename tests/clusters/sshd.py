"""Debian's sshd on machines that are namespaces, with keys and a config made for the test."""

import contextlib
import subprocess
from pathlib import Path

from clusters.hosts import Hosts, refuse_without

_CONFIG = """
HostKey "{folder}/host"
AuthorizedKeysFile "{folder}/mine.pub"
StrictModes no
UsePAM no
PidFile none
"""
_MY_CONFIG = """
IdentityFile "{folder}/mine"
IdentitiesOnly yes
UserKnownHostsFile "{folder}/known"
GlobalKnownHostsFile none
"""
# /run/sshd has to be there: it is, where nobody else looks.
_SERVE = """
mount -t tmpfs none /run
mkdir /run/sshd
exec "$(command -v sshd)" -D -e -f "$0"
"""


@contextlib.contextmanager
def sshd(hosts: Hosts, folder: Path, *names: str):
    """While open, these hosts are served; yields a folder for PATH, with an ssh that knows them."""
    refuse_without("sshd", "ssh", "ssh-keygen")
    for key in ("host", "mine"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(command, check=True)
    (folder / "sshd_config").write_text(_CONFIG.format(folder=folder))
    (folder / "ssh_config").write_text(_MY_CONFIG.format(folder=folder))
    public = (folder / "host.pub").read_text()
    (folder / "known").write_text("".join(f"{name} {public}" for name in names))
    bin = folder / "bin"
    bin.mkdir()
    # ssh looks for the user's config where the system says, not where HOME does.
    (bin / "ssh").write_text(
        f'#!/bin/sh\nPATH="$REAL_PATH" exec ssh -F "{folder}/ssh_config" "$@"\n'
    )
    (bin / "ssh").chmod(0o755)
    with contextlib.ExitStack() as stack:
        for name in names:
            process = hosts.start(
                name, "sh", "-c", _SERVE, folder / "sshd_config", stderr=-1, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            said = process.stderr.readline()
            assert "listening" in said, said + process.stderr.read()
        yield bin
