"""Which queries of a rank see which keys of another, and by which calls that is computed.

Every rank can tell this for any two ranks. So a rank knows what the others need of its keys, and
sends only that; what positions hide is neither sent nor multiplied.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_ALL = 1 << 62  # the width of a window that hides nothing, in positions


class Range(NamedTuple):
    begin: int
    end: int

    @property
    def size(self) -> int:
        return max(0, self.end - self.begin)

    def __and__(self, other: "Range") -> "Range":
        return Range(max(self.begin, other.begin), min(self.end, other.end))

    def moved(self, by: int) -> "Range":
        return Range(self.begin + by, self.end + by)


class Span(NamedTuple):
    """Neighbours in the sequence that are neighbours on their rank, too."""

    positions: Range  # in the sequence
    shift: int  # what is added to a position to get the row in the rank's tensors


class Block(NamedTuple):
    """One call of the operator: some rows of a rank's queries, some rows of another's keys."""

    rows: Range
    columns: Range
    is_causal: bool
    # The positions of the first query and the first key, in a sequence or document that begins at
    # position `origin` and is `length` long. A length of 0: is_causal counts rows and columns as
    # they are, and nothing else depends on positions.
    query_begin: int = 0
    key_begin: int = 0
    origin: int = 0
    length: int = 0
    # Of packed documents: the number of the first, and where each begins and the last one ends,
    # in rows of the call; None if there is one alone.
    document: int = 0
    ends: tuple[int, ...] | None = None
    # Whether the keys are those at the places of the queries. A row sums its sink with these alone.
    has_sinks: bool = False

    def of_columns(self, part: Range) -> "list[Block]":
        """What the block has of these columns, counted from the first of them."""
        own = self.columns & part
        begin = self.key_begin + (own.begin - self.columns.begin if self.length else 0)
        return [self._replace(columns=own.moved(-part.begin), key_begin=begin)] if own.size else []


class Step(NamedTuple):
    """What the queries of one rank see of the keys of another."""

    columns: list[Range]  # the rows of the keys that any query sees
    blocks: list[Block]  # whose columns are counted in these alone

    def cut(self, number: int, cuts: int) -> "Step":
        """One of so many equal parts of the columns. Packed documents are not cut."""
        if cuts == 1:
            return self
        count = sum(rows.size for rows in self.columns)
        own = Range(count * number // cuts, count * (number + 1) // cuts)
        columns, begin = [], 0
        for rows in self.columns:
            seen = Range(begin, begin + rows.size) & own
            columns += [seen.moved(rows.begin - begin)] if seen.size else []
            begin += rows.size
        return Step(columns, [x for block in self.blocks for x in block.of_columns(own)])


class Plan(NamedTuple):
    """How a sequence lies on `size` ranks, and what its queries see.

    Attributes:
        chunk: how long each of its 2 * size chunks is (_shards.py).
        seqlen: its length without padding.
        is_causal, window: whether a query sees no keys after its own, and how many before and after
            it at most; -1: all.
        positions: whether a score depends on where its query and key are, except for is_causal.
        ends: where packed documents begin and the last one ends, [N + 1] positions.
        may_pack: whether documents may be computed by one packed call.
    """

    size: int
    chunk: int
    seqlen: int
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    positions: bool = True
    ends: Sequence[int] | None = None
    may_pack: bool = True

    def spans(self, rank: int) -> list[Span]:
        """What a rank holds. The two chunks of the last rank are neighbours, and one span."""
        numbers, whole = (rank, 2 * self.size - 1 - rank), Range(0, self.seqlen)
        places = _union(Range(i * self.chunk, (i + 1) * self.chunk) for i in numbers)
        found = [Span(p & whole, i * self.chunk - p.begin) for i, p in enumerate(places)]
        return [span for span in found if span.positions.size]

    def step(self, rank: int, other: int) -> Step:
        """What the queries of `rank` see of the keys of `other`."""
        blocks = [*(self._blocks if self.positions else self._one_block)(rank, other)]
        columns = _union(block.columns for block in blocks)
        return Step(columns, [_counted_in(columns, block) for block in blocks])

    def _one_block(self, rank: int, other: int) -> Iterator[Block]:
        """Where only the order of positions matters, one call does all chunks: rows are in the
        order of positions on every rank; and of two chunks on different ranks, one sees the other
        whole or not at all."""
        seen = [
            (mine.positions.moved(mine.shift), theirs.positions.moved(theirs.shift))
            for mine in self.spans(rank)
            for theirs in self.spans(other)
            if rank == other or not self.is_causal or theirs.positions < mine.positions
        ]
        if seen:
            rows, columns = (_hull(ranges) for ranges in zip(*seen, strict=True))
            is_own = rank == other
            yield Block(rows, columns, self.is_causal and is_own, has_sinks=is_own)

    def _blocks(self, rank: int, other: int) -> Iterator[Block]:
        for mine in self.spans(rank):
            for theirs in self.spans(other):
                if self.ends is None:
                    yield from self._dense(mine, theirs, Range(0, self.seqlen))
                else:
                    yield from self._of_documents(mine, theirs, self.ends)

    def _dense(self, mine: Span, theirs: Span, whole: Range, number: int = 0) -> Iterator[Block]:
        """What two spans have of a sequence, or of document `number`, less the queries that see
        nothing and the keys that are not seen because of the window."""
        queries, keys = mine.positions & whole, theirs.positions & whole
        left, right = (_ALL if side < 0 else side for side in self.window)
        right = 0 if self.is_causal else right
        seen = keys & Range(queries.begin - left, queries.end + right)
        queries &= Range(seen.begin - right, seen.end + left)
        if seen.size and queries.size:
            yield Block(
                queries.moved(mine.shift), seen.moved(theirs.shift), self.is_causal,
                queries.begin, seen.begin, whole.begin, whole.size, number,
                has_sinks=mine == theirs,
            )  # fmt: skip

    def _of_documents(self, mine: Span, theirs: Span, ends: Sequence[int]) -> Iterator[Block]:
        """Documents that lie in one span as a whole are one packed call; there may be a part alone
        of its first and its last one, and two spans have one in common at most."""
        numbers = _documents(mine.positions, ends), _documents(theirs.positions, ends)
        own, packed = mine.positions, range(0)
        if mine == theirs and self.may_pack:
            packed = range(bisect_left(ends, own.begin), bisect_right(ends, own.end) - 1)
        if len(packed) > 1 and (begin := ends[packed.start]) < ends[packed.stop]:
            rows = Range(begin, ends[packed.stop]).moved(mine.shift)
            own_ends = tuple(end - begin for end in ends[packed.start : packed.stop + 1])
            place = begin, begin, begin, 0, packed.start
            yield Block(rows, rows, self.is_causal, *place, own_ends, has_sinks=True)
        else:
            packed = range(0)
        for number in range(max(x.start for x in numbers), min(x.stop for x in numbers)):
            if number not in packed:
                whole = Range(ends[number], ends[number + 1])
                yield from self._dense(mine, theirs, whole, number)


def _documents(places: Range, ends: Sequence[int]) -> range:
    """The numbers of those that have something of these places."""
    first = bisect_right(ends, places.begin) - 1
    return range(max(0, first), min(len(ends) - 1, bisect_left(ends, places.end)))


def _hull(ranges: Sequence[Range]) -> Range:
    return Range(min(x.begin for x in ranges), max(x.end for x in ranges))


def _union(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for one in sorted(ranges):
        if found and one.begin <= found[-1].end:
            found[-1] = _hull([found[-1], one])
        else:
            found.append(one)
    return found


def _counted_in(columns: list[Range], block: Block) -> Block:
    before = sum((one & Range(0, block.columns.begin)).size for one in columns)
    return block._replace(columns=Range(before, before + block.columns.size))
