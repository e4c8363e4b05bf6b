"""The short ladder of shapes that generation runs in, so that no length of a prompt or answer compiles anything new."""

from collections.abc import Sequence

CHUNKS = (16, 32, 64, 128, 256, 512)  # Widths of a prefill chunk: the largest, then the least that holds the rest.
LEAST_SLOTS = 256  # The smallest cache; each larger one doubles.
LEAST_ROOM = 128  # Slots left free for new tokens when a generation starts.


def ladder(needed: int, least: int = LEAST_SLOTS) -> int:
    """The first size of least, 2 least, 4 least, ... that holds `needed`."""
    size = least
    while size < needed:
        size *= 2
    return size


def slots_for(longest: int) -> int:
    """The slots that a generation starts with."""
    return ladder(longest + LEAST_ROOM)


def chunk_width(rest: int) -> int:
    """The width of the next chunk where `rest` tokens are left."""
    return next((c for c in CHUNKS if c >= rest), CHUNKS[-1])


def slots_to_read(written: int, slots: int) -> int:
    """How many slots of the cache to look at when at most `written` of a row hold something."""
    return min(ladder(written, CHUNKS[-1]), slots) if written else 0


def chunk_plan(starts: Sequence[int], lengths: Sequence[int], slots: int) -> list[tuple[int, int, int]]:
    """(tokens done of each row's rest, width, slots to read) of each prefill chunk.

    Row i goes from starts[i] to lengths[i], its first starts[i] tokens being in the cache.
    """
    rest = max(length - start for start, length in zip(starts, lengths, strict=True))
    plan, done = [], 0
    while done < rest:
        width = chunk_width(rest - done)
        written = max(min(start + done, length) for start, length in zip(starts, lengths, strict=True))
        plan.append((done, width, slots_to_read(written, slots)))
        done += width
    return plan


def warm_shapes(max_len: int, reuse: bool = False) -> dict[int, set[tuple[int, int]]]:
    """Every cache size that rows of up to `max_len` tokens meet, with the (width, read) of the chunks met there.

    With reuse, a row may start anywhere.
    """
    shapes: dict[int, set[tuple[int, int]]] = {}
    for longest in range(1, max_len):
        slots = slots_for(longest)
        chunks = {(width, read) for _, width, read in chunk_plan([0], [longest], slots)}
        if reuse:
            widths = [c for c in CHUNKS if c <= chunk_width(longest)]
            reads = {slots_to_read(written, slots) for written in (*range(1, longest, CHUNKS[-1]), longest)}
            chunks |= {(width, read) for width in widths for read in reads}
        shapes.setdefault(slots, set()).update(chunks)
    return shapes
