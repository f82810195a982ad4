"""How long one attention layer trains, forward and backward, on many hosts: arithmetic alone.

docs/distributed.md derives it. Everything is in seconds, bytes and tokens of one sequence; a pair
is one query and one key that it sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from qkv.distributed._passes import parts_of

from .figures import Hosts, Layer

# Of a pair, a head and a feature: two products of two operations each forward, five backward.
FLOPS = {"forward": 4, "backward": 10}
GRADIENT_BYTES = 4  # gradients of keys and values travel as float32


@dataclass(frozen=True)
class Split:
    """`heads` ranks divide the heads (all-to-all), `ring` ranks the sequence."""

    heads: int
    ring: int

    def __str__(self) -> str:
        return f"{self.heads}×{self.ring}"


def splits(ranks: int, layer: Layer) -> Iterator[Split]:
    """All that this many ranks can do. Where there are fewer heads of keys than ranks, some ranks
    have the same one."""
    for heads in range(1, layer.heads + 1):
        few, many = sorted((heads, layer.kv_heads))
        if not (ranks % heads or layer.heads % heads or many % few):
            yield Split(heads, ranks // heads)


def ideal(layer: Layer, tokens: int, ranks: int, hosts: Hosts) -> float:
    """The operations of causal attention, evenly divided, and nothing else."""
    pairs = tokens**2 / 2 * layer.heads * layer.head_dim
    flops = {name: count * pairs for name, count in FLOPS.items()}
    core = hosts.core
    seconds = flops["forward"] * core.forward.flop + flops["backward"] * core.backward.flop
    return seconds / ranks / hosts.speed


def predict(layer: Layer, tokens: int, split: Split, hosts: Hosts, is_zigzag: bool = True) -> float:
    """Seconds of forward and backward of causal attention over `tokens` on `split`'s ranks."""
    passes = sum(
        exchange(name, layer, tokens, split, hosts)
        + ring(name, layer, tokens, split, hosts, is_zigzag)
        for name in FLOPS
    )
    return agreement(split, hosts) + passes


def agreement(split: Split, hosts: Hosts) -> float:
    """Ranks compare their arguments before they compute: a few bytes from each to all others, over
    the heads and then over the ring. gloo hands them on from neighbour to neighbour."""
    return (split.heads - 1 + split.ring - 1) * hosts.link.latency


def exchange(name: str, layer: Layer, tokens: int, split: Split, hosts: Hosts) -> float:
    """What the all-to-alls of one pass take: query, key and value on their way there and output
    and lse on their way back, or the output's gradient there and the three others back. Nothing
    computes meanwhile. A rank keeps its own part, and its messages go one after the other."""
    others = split.heads - 1
    if not others:
        return 0.0
    features = 2 * (layer.heads + max(layer.kv_heads, split.heads)) * layer.head_dim
    local = tokens / (split.heads * split.ring) * features * layer.itemsize
    calls = {"forward": 5, "backward": 4}[name]
    link = hosts.link
    return local * others / split.heads / link.bytes_per_s + calls * others * link.latency


def ring(
    name: str, layer: Layer, tokens: int, split: Split, hosts: Hosts, is_zigzag: bool
) -> float:
    """What the ring's steps of one pass take, all of them as long as on the rank that has most.

    A rank has `rows` tokens, and in each step sees the keys of one rank. With zigzag shards every
    step has half of the pairs: in the first they are causal; in the others one half of the queries
    sees all keys, or all queries one half. Without, a rank sees all of the keys or none of them,
    and the last rank sees all in every step but the first.

    Keys travel in parts of their heads and rows (_passes.py): a visit is what is computed with one
    message. Each step but the first has so many `cuts`, of all queries and some of the keys.
    """
    rows = tokens / split.ring
    heads, kv_heads = layer.heads / split.heads, max(1, layer.kv_heads / split.heads)
    elements = 2 * rows * kv_heads * layer.head_dim  # of keys and values
    parts, cuts = parts_of(int(kv_heads), int(elements * layer.itemsize))
    visits = 1 + (split.ring - 1) * cuts  # of a part
    keys = elements * layer.itemsize / parts / cuts
    gradients = elements * GRADIENT_BYTES / parts / cuts if name == "backward" else 0.0
    block = {"forward": hosts.core.forward, "backward": hosts.core.backward}[name]
    if split.ring == 1:  # which is one call of the operator, and nothing is merged
        parts, gradients, block = 1, 0.0, replace(block, element=0.0)

    def compute(pairs: float) -> float:
        features = heads / parts * layer.head_dim
        work = rows * features * block.element + FLOPS[name] * pairs * features * block.flop
        return block.fixed + work / hosts.speed

    def moved(visit: int, part: int = 0) -> float:
        """The keys of the next visit are on their way here, the gradients of the visit before on
        their way home. Keys and gradients of each part's first visit are this rank's own."""
        coming = keys if visit < visits - 1 else 0.0
        leaving = gradients if visit > 1 or (visit == 0 and part > 0) else 0.0
        return coming + leaving

    own = block.causal * compute(rows**2 / 2)
    other = compute(rows**2 / (2 if is_zigzag else 1) / cuts)
    total = overlapped(own, moved(0), hosts) + (parts - 1) * overlapped(own, moved(0, 1), hosts)
    # All but the second and the last are alike.
    for visit, count in ((1, 1), (2, max(0, visits - 3)), (visits - 1, 1 if visits > 2 else 0)):
        if count and visits > 1:
            total += parts * count * overlapped(other, moved(visit), hosts)
    return total + overlapped(0.0, gradients, hosts)  # the last have nothing to hide behind


def overlapped(compute: float, moved: float, hosts: Hosts) -> float:
    """Of computing while so many bytes go out and come in: what takes longer, where computing also
    loses the time of the cores that move the bytes."""
    if not moved:
        return compute
    link = hosts.link
    slowed = compute + moved * hosts.core.transport_cpu / hosts.cores
    return max(slowed, link.latency + moved / link.bytes_per_s)


def efficiency(
    layer: Layer, tokens: int, split: Split, hosts: Hosts, is_zigzag: bool = True
) -> float:
    """The share of the time in which all hosts do nothing but the operations of attention."""
    ranks = split.heads * split.ring
    return ideal(layer, tokens, ranks, hosts) / predict(layer, tokens, split, hosts, is_zigzag)
