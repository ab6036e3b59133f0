"""What a disk may hold after a crash: the file operations of a program, and any part of them."""

import itertools
import re
import subprocess
from dataclasses import dataclass, field
from typing import Any

_UNUSED = ("pwrite64", "ftruncate", "link", "linkat", "symlink", "symlinkat", "copy_file_range")
_KINDS = {"write": "write", "writev": "write", "fsync": "sync", "fdatasync": "sync"}
_KINDS |= dict.fromkeys(("rename", "renameat", "renameat2"), "rename")
_KINDS |= dict.fromkeys(("unlink", "unlinkat", "rmdir"), "remove")
_KINDS |= {"openat": "create", "mkdir": "mkdir", "mkdirat": "mkdir"}

_HEX = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+).*", re.DOTALL)
_FD = re.compile(r"(?:\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})+)>")


def record(command, trace, **options):
    """Runs a command, and returns its file operations: kind, path, and bytes, path or flag."""
    calls = f"trace={','.join((*_KINDS, *_UNUSED, 'sendfile'))}"
    arguments = ["-f", "-y", "-qq", "-xx", "-s", str(2**25), "-e", calls, "-o", trace]
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
    kind = _KINDS[name]  # of the others, what they do to a disk is not known here
    folders = [_bytes(path).decode() for path in _FD.findall(arguments)]
    strings = [_bytes(text) for text in _HEX.findall(arguments)]
    if kind in ("write", "sync"):
        yield kind, folders[0], b"".join(strings)
    elif kind != "create" or "O_CREAT" in arguments:
        # Each path is relative to the folder that stands before it, where there is one.
        path, *other = (
            string.decode() if string.startswith(b"/") else f"{folder}/{string.decode()}"
            for string, folder in itertools.zip_longest(strings, folders)
            if string is not None
        )
        yield kind, path, other[0] if other else "O_TRUNC" in arguments


def _bytes(text):
    return bytes.fromhex(text.replace("\\x", ""))


@dataclass
class Node:
    """A file or a folder: its bytes or entries, and those of the last sync."""

    now: Any
    synced: Any

    def sync(self):
        self.synced = self.now if isinstance(self.now, bytes) else dict(self.now)


@dataclass
class Disk:
    """A directory, through the operations of a program, which calls it by this path."""

    path: str
    root: Node = field(default_factory=lambda: Node({}, {}))

    def is_inside(self, operation):
        return f"{operation[1]}/".startswith(f"{self.path}/")

    def apply(self, operation):
        kind, path, rest = operation
        if kind == "sync":
            self._find(path).sync()
        if kind == "sync" or path == self.path:  # which is there
            return
        folder, name = self._place(path)
        match kind:
            case "mkdir":
                folder[name] = Node({}, {})
            case "create":
                there = folder.setdefault(name, Node(b"", b""))
                there.now = b"" if rest else there.now
            case "write":
                folder[name].now += rest
            case "remove":
                del folder[name]
            case "rename":
                other, new = self._place(rest)
                other[new] = folder.pop(name)

    def _find(self, path):
        node = self.root
        for name in filter(None, path.removeprefix(self.path).split("/")):
            node = node.now[name]
        return node

    def _place(self, path):
        above, _, name = path.rpartition("/")
        return self._find(above).now, name

    def after_kill(self):
        """What is there when the process has been killed: paths, with bytes, or None."""
        return dict(_contents(self.root))

    def after_power_loss(self):
        """What may be there when the machine has gone: all unsynced is lost, or any one of it."""
        unsynced = [id(x) for x in _all(self.root) if x.synced != x.now]
        for lost in (unsynced, *([one] for one in unsynced)):
            yield dict(_contents(self.root, lost=lost))


def _all(node):
    yield node
    if isinstance(node.now, dict):
        for inside in node.now.values():
            yield from _all(inside)


def _contents(folder, above="", lost=()):
    for name, inside in (folder.synced if id(folder) in lost else folder.now).items():
        path, is_folder = f"{above}{name}", isinstance(inside.now, dict)
        yield path, None if is_folder else inside.synced if id(inside) in lost else inside.now
        if is_folder:
            yield from _contents(inside, f"{path}/", lost)


def write(contents, folder):
    """Makes files and folders of what a disk holds."""
    folder.mkdir()
    for path, data in contents.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
