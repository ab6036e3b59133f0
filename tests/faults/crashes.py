"""What a disk may hold after a crash: a program's file operations, recorded, and any part of them.

`record` runs a program under strace. `Disk` takes the operations one after the other, and knows of
each file and each directory what has been synced: a process that is killed leaves all that it has
done, a machine that loses power may lose whatever was not synced.
"""

import itertools
import re
import subprocess
from dataclasses import dataclass, field

CALLS = "openat,write,pwrite64,writev,ftruncate,fsync,fdatasync,rename,renameat,renameat2,mkdir"
CALLS += ",mkdirat,unlink,unlinkat,rmdir,link,linkat,symlink,symlinkat,copy_file_range,sendfile"

_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+).*", re.DOTALL)
_FD = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})+)>")


def record(command, trace, **options):
    """Runs a command, and returns its file operations: name, paths and bytes, flags as text."""
    arguments = ["-f", "-y", "-qq", "-xx", "-s", str(2**25), "-e", f"trace={CALLS}", "-o", trace]
    subprocess.run(["strace", *arguments, *command], check=True, **options)
    return list(_parse(trace.read_text().splitlines()))


def _parse(lines):
    begun = {}
    for line in lines:
        process, rest = line.split(maxsplit=1)
        if rest.endswith("<unfinished ...>"):
            begun[process] = rest.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>(.*)", rest, re.DOTALL):
            line = f"{process} {begun.pop(process)}{resumed[1]}"
        if (call := _CALL.match(line)) and int(call[4]) >= 0:
            yield from _operation(call[2], call[3])


def _operation(name, arguments):
    open_files = [_text(path) for path in _FD.findall(arguments)]
    strings = [bytes.fromhex(text.replace("\\x", "")) for text in _HEX.findall(arguments)]
    if name in ("write", "writev"):
        yield "write", open_files[0], b"".join(strings)
    elif name in ("fsync", "fdatasync"):
        yield "sync", open_files[0], None
    elif name in (
        "pwrite64",
        "ftruncate",
        "link",
        "linkat",
        "symlink",
        "symlinkat",
        "copy_file_range",
    ):
        raise NotImplementedError(name)
    else:
        paths = _full(strings, open_files)
        if name == "openat" and "O_CREAT" in arguments:
            yield "create", paths[0], "O_TRUNC" in arguments
        elif name.startswith("rename"):
            yield "rename", paths[0], paths[1]
        elif name.startswith("mkdir"):
            yield "mkdir", paths[0], None
        elif name == "rmdir" or name.startswith("unlink"):
            yield "remove", paths[0], None
        elif name != "openat":
            raise NotImplementedError(name)


def _text(path):
    return bytes.fromhex(path.replace("\\x", "")).decode()


def _full(strings, folders):
    """Paths, each relative to the folder that stands before it, where there is one."""
    return [
        string.decode() if string.startswith(b"/") else f"{folder}/{string.decode()}"
        for string, folder in itertools.zip_longest(strings, folders)
        if string is not None
    ]


@dataclass
class File:
    data: bytes = b""
    synced: bytes = b""


@dataclass
class Folder:
    entries: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)


class Disk:
    """A directory, through the operations of a program.

    Args:
      path: The directory, as the program calls it; it and what is above are there.
    """

    def __init__(self, path):
        self._path, self.root = str(path), Folder()

    def is_inside(self, operation):
        return operation[1].startswith(self._path + "/") or operation[1] == self._path

    def apply(self, operation):
        kind, path, rest = operation
        if path == self._path:
            if kind == "sync":
                self.root.synced = dict(self.root.entries)
            return
        folder, name = self._find(path)
        if kind == "mkdir":
            folder.entries[name] = Folder()
        elif kind == "create":
            there = folder.entries.setdefault(name, File())
            if rest:
                there.data = b""
        elif kind == "write":
            folder.entries[name].data += rest
        elif kind == "remove":
            del folder.entries[name]
        elif kind == "rename":
            other, new = self._find(rest)
            other.entries[new] = folder.entries.pop(name)
        elif kind == "sync":
            there = folder.entries[name]
            there.synced = dict(there.entries) if isinstance(there, Folder) else there.data

    def _find(self, path):
        *folders, name = path.removeprefix(self._path + "/").split("/")
        inside = self.root
        for folder in folders:
            inside = inside.entries[folder]
        return inside, name

    def after_kill(self):
        """What is there when the process has been killed: paths, with bytes, or None."""
        return dict(self._contents(self.root, ""))

    def after_power_loss(self):
        """What may be there when the machine has gone: all unsynced is lost, or any one of it."""
        unsynced = [x for x in self._all(self.root) if x.synced != self._now(x)]
        yield dict(self._contents(self.root, "", lost=[*map(id, unsynced)]))
        for one in unsynced:
            yield dict(self._contents(self.root, "", lost=[id(one)]))

    def _all(self, folder):
        yield folder
        for inside in folder.entries.values():
            yield from self._all(inside) if isinstance(inside, Folder) else [inside]

    @staticmethod
    def _now(x):
        return x.entries if isinstance(x, Folder) else x.data

    def _contents(self, folder, above, lost=()):
        entries = folder.synced if id(folder) in lost else folder.entries
        for name, inside in entries.items():
            path = f"{above}{name}"
            if isinstance(inside, Folder):
                yield path, None
                yield from self._contents(inside, f"{path}/", lost)
            else:
                yield path, inside.synced if id(inside) in lost else inside.data


def write(contents, folder):
    """Makes files and folders of what a disk holds."""
    folder.mkdir()
    for path, data in contents.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
