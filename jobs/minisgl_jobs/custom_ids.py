"""Finds repeated `custom_id`s among millions of rows in little memory. Called by the row reader."""

from __future__ import annotations

from array import array

_MASK = (1 << 64) - 1


class CustomIdIndex:
    """Remembers the line of each id as an 8-byte hash and a 4-byte line number: 18 to 36 bytes an id.

    A hash table with open addressing in two flat arrays (a dict would take ten times as much). Two different ids are
    taken for equal with a probability of about n^2 / 2^65: 3 in a million for ten million ids. The hash is Python's
    keyed one, so nobody can prepare ids that collide.
    """

    def __init__(self) -> None:
        self._num_ids = 0
        self._allocate(1 << 10)

    def add(self, custom_id: str, line: int) -> int | None:
        """Remember an id; answers the line that had it before, or None."""
        key = hash(custom_id) & _MASK or 1  # 0 marks a free slot
        slot = self._slot(key)
        if self._keys[slot]:
            return self._lines[slot]
        self._keys[slot], self._lines[slot] = key, min(line, 0xFFFFFFFF)
        self._num_ids += 1
        if self._num_ids * 3 > len(self._keys) * 2:
            self._grow()
        return None

    def _slot(self, key: int) -> int:
        keys, mask = self._keys, len(self._keys) - 1
        slot = key & mask
        while (found := keys[slot]) and found != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        keys, lines = self._keys, self._lines
        self._allocate(2 * len(keys))
        for key, line in zip(keys, lines, strict=True):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._lines[slot] = key, line

    def _allocate(self, num_slots: int) -> None:
        self._keys = array("Q", bytes(8 * num_slots))
        self._lines = array("I", bytes(4 * num_slots))
