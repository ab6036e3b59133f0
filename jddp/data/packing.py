"""Packs items of different lengths into rows of one length, with little room left.

    pack_items(np.array([5, 3, 4, 2]), capacity=8)       # the row of each item: [0, 0, 1, 1]

Items are placed from the longest to the shortest, each in the row where it leaves least room.
Lengths are whole numbers, so items of one length are placed together, in rows with the same room:
Python takes a step for a few of them at once, and ten million items take seconds.

References:
  Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing Algorithms",
  SIAM J. Comput. 3 (1974), for best fit decreasing: at most 11/9 of the fewest rows, and 4.
  Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, for its use on documents.
  https://arxiv.org/abs/2404.10830
"""

import bisect
from collections import defaultdict

import numpy as np


def pack_items(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each item: a function of the lengths alone.

    Args:
      lengths: Lengths of the items, whole numbers from 1 to `capacity`, `(n,)`.
      capacity: Length of a row.

    Returns:
      Numbers of rows from 0 on, `(n,)`, in the order of the first item of each row.
    """
    room_left = (capacity - lengths).astype(np.uint16 if capacity <= 2**16 else np.uint32)
    longest_first = np.argsort(room_left, kind="stable")
    ends = np.cumsum(np.bincount(room_left, minlength=capacity))
    rows = np.empty(len(lengths), np.int64)
    open_rows = _OpenRows(capacity)
    for room, items in enumerate(np.split(longest_first, ends[:-1])):
        while len(items):
            placed = open_rows.place(capacity - room, len(items))
            rows[items[: len(placed)]] = placed
            items = items[len(placed) :]
    return _in_order(rows)


class _OpenRows:
    """Rows by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._num_rows = 0
        self._groups: dict[int, list[np.ndarray]] = defaultdict(list)
        self._rooms: list[int] = []  # the keys of the groups, in rising order

    def place(self, length: int, num_items: int) -> np.ndarray:
        """Rows for the next of several items of one length: the fullest rows that have room."""
        room, rows = self._fullest(length, num_items)
        num_each = room // length
        num_used = min(len(rows), -(-num_items // num_each))
        placed = np.repeat(rows[:num_used], num_each)[:num_items]
        num_in_last = len(placed) - (num_used - 1) * num_each
        self._keep(room, rows[num_used:])
        self._keep(room - num_each * length, rows[: num_used - 1])
        self._keep(room - num_in_last * length, rows[num_used - 1 : num_used])
        return placed

    def _fullest(self, length: int, num_items: int) -> tuple[int, np.ndarray]:
        """Rows with the least room that suffices, taken out; or new ones."""
        place = bisect.bisect_left(self._rooms, length)
        if place == len(self._rooms):
            first = self._num_rows
            self._num_rows += -(-num_items // (self._capacity // length))
            return self._capacity, np.arange(first, self._num_rows)
        room = self._rooms[place]
        group = self._groups[room]
        rows = group.pop()
        if not group:
            del self._groups[room], self._rooms[place]
        return room, rows

    def _keep(self, room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if room not in self._groups:
                bisect.insort(self._rooms, room)
            self._groups[room].append(rows)


def _in_order(rows: np.ndarray) -> np.ndarray:
    """The rows, numbered in the order of their first items."""
    _, first_items = np.unique(rows, return_index=True)
    numbers = np.empty(len(first_items), np.int64)
    numbers[np.argsort(first_items)] = np.arange(len(first_items))
    return numbers[rows]
