"""Which keys each rank is sent, and which calls it makes: every pair of a query and a key that it
sees is in one call, and what nobody sees is neither sent nor multiplied."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.distributed._plan import Plan


@st.composite
def plans(draw):
    size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    seqlen = draw(st.integers(0, 40))
    ends = draw(st.none() | st.lists(st.integers(0, seqlen), min_size=1, max_size=8).map(sorted))
    side = st.sampled_from([-1, -1, 0, 1, 3])
    window = draw(side), draw(side)
    return Plan(
        size=size,
        chunk=math.ceil(seqlen / (2 * size)) + draw(st.integers(0, 1)),
        seqlen=seqlen,
        is_causal=draw(st.booleans()),
        window=window,
        positions=ends is not None or window != (-1, -1) or draw(st.booleans()),
        ends=ends,
        may_pack=draw(st.booleans()),
    )


def seen_by(plan):
    """bool [N, N]: which keys each query of the whole sequence sees."""
    position = torch.arange(plan.seqlen)
    ahead = position - position[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    left, right = plan.window
    seen &= (ahead <= 0) | (not plan.is_causal)
    seen &= (-ahead <= left) | (left < 0)
    seen &= (ahead <= right) | (right < 0)
    if plan.ends is not None:
        ends = torch.tensor(plan.ends)
        document = torch.bucketize(position, ends, right=True) - 1
        is_in_one = (document >= 0) & (document < len(ends) - 1)
        seen &= (document == document[:, None]) & is_in_one
    return seen


def positions_of(plan, rank):
    """The position of each row of a rank."""
    positions = torch.full((2 * plan.chunk,), -1)
    for span in plan.spans(rank):
        begin, end = span.positions.begin, span.positions.end
        positions[begin + span.shift : end + span.shift] = torch.arange(begin, end)
    return positions


def seen_in(block, plan, queries, keys):
    """bool [queries, keys]: what a call of the operator for a block sees of these positions, which
    it is told in its own way."""
    i, j = torch.arange(len(queries))[:, None], torch.arange(len(keys))
    if block.ends is not None:
        document = torch.bucketize(i, torch.tensor(block.ends), right=True)
        seen = document == document.mT
        numbers = block.document + document.squeeze(1) - 1
        begins = torch.tensor(plan.ends)[numbers]
        assert (begins <= queries).all()
        assert torch.equal(begins - block.origin, torch.tensor(block.ends)[document.squeeze(1) - 1])
    else:
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool)
        if block.length and plan.ends is not None:
            begin, end = plan.ends[block.document], plan.ends[block.document + 1]
            assert (block.origin, block.length) == (begin, end - begin)
    if block.length:
        i, j = i + block.query_begin, j + block.key_begin
        assert torch.equal(i.squeeze(1), queries) and torch.equal(j, keys)
    left, right = plan.window if plan.positions else (-1, -1)
    seen = seen & (j <= i) if block.is_causal else seen
    seen = seen & (i - j <= left) if left >= 0 else seen
    return seen & (j - i <= right) if right >= 0 else seen


@given(plan=plans(), cuts=st.integers(1, 4))
def test_every_pair_is_in_one_call(plan, cuts):
    found = torch.zeros(plan.seqlen, plan.seqlen, dtype=torch.int64)
    for rank in range(plan.size):
        queries = positions_of(plan, rank)
        for other in range(plan.size):
            keys = positions_of(plan, other)
            for cut in range(1 if rank == other else cuts):
                step = plan.step(rank, other).cut(cut, 1 if rank == other else cuts)
                sent = [keys[rows.begin : rows.end] for rows in step.columns]
                sent = torch.cat(sent) if sent else keys[:0]
                used = torch.zeros(len(sent), dtype=torch.bool)
                for block in step.blocks:
                    own = queries[block.rows.begin : block.rows.end]
                    theirs = sent[block.columns.begin : block.columns.end]
                    assert len(own) == block.rows.size and len(theirs) == block.columns.size
                    found[own[:, None], theirs] += seen_in(block, plan, own, theirs)
                    used[block.columns.begin : block.columns.end] = True
                assert used.all()
    assert torch.equal(found, seen_by(plan).long())


def sent(plan):
    """How many rows of keys travel, of all ranks."""
    ranks = range(plan.size)
    steps = [plan.step(rank, other) for rank in ranks for other in ranks if rank != other]
    return sum(rows.size for step in steps for rows in step.columns)


def multiplied(plan, rank):
    """How many pairs of a query and a key the calls of a rank have."""
    steps = [plan.step(rank, other) for other in range(plan.size)]
    return sum(b.rows.size * b.columns.size for step in steps for b in step.blocks)


def test_what_is_sent_and_multiplied():
    whole = Plan(size=8, chunk=64, seqlen=1024, positions=False)
    assert sent(whole) == 7 * 1024
    causal = Plan(size=8, chunk=64, seqlen=1024, positions=False, is_causal=True)
    assert sent(causal) == 0.75 * sent(whole)
    # Half of all pairs, but for the own ones, of which the operator leaves out what is hidden; and
    # as many on each rank.
    assert {multiplied(causal, rank) for rank in range(8)} == {128 * 128 + 7 * 2 * 64 * 64}
    window = Plan(size=8, chunk=64, seqlen=1024, window=(10, 0))
    assert sent(window) == 14 * 10  # at each boundary of chunks, but one between chunks of one rank
    # Beside the own ones, of which the operator leaves out what is hidden.
    assert [multiplied(window, rank) - 2 * 64 * 64 for rank in range(1, 7)] == [2 * 10 * 10] * 6
    documents = Plan(size=8, chunk=64, seqlen=1024, ends=range(0, 1025, 64))
    assert sent(documents) == 0


def test_few_calls():
    """One call a step where only the order of positions matters, one for all documents of a chunk
    where these are whole."""
    for is_causal in (False, True):
        plan = Plan(size=4, chunk=8, seqlen=64, positions=False, is_causal=is_causal)
        assert all(len(plan.step(r, o).blocks) == 1 for r in range(4) for o in range(4))
    documents = Plan(size=4, chunk=8, seqlen=64, ends=range(0, 65, 2))
    assert [len(documents.step(r, r).blocks) for r in range(4)] == [2, 2, 2, 1]
