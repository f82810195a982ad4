"""What the model is made of: figures of the machine that measures, and of the hosts that it is
about, in seconds and bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layer:
    """head_dim is that of keys and of values; itemsize is that of what attention is given."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    itemsize: int = 2


@dataclass(frozen=True)
class Pass:
    """What a block of attention takes on one core, forward or backward.

    fixed: seconds of a block, however small. element: seconds for each element of its queries,
    which merging a block with those before takes. flop: seconds of an operation. causal: how many
    times as long a causal block takes as one without a mask that has as many pairs.
    """

    fixed: float
    element: float
    flop: float
    causal: float = 1.0


@dataclass(frozen=True)
class Link:
    """bytes_per_s go each way while as many come the other way; latency is that of a message."""

    bytes_per_s: float
    latency: float


@dataclass(frozen=True)
class Core:
    """What is measured on two cores of one machine. transport: over loopback, where both ends are
    programs on a core of their own and nothing else is slow: what gloo can do. transport_cpu:
    seconds of a core that computing loses to each byte that a rank sends and receives."""

    forward: Pass
    backward: Pass
    transport: Link
    transport_cpu: float


@dataclass(frozen=True)
class Hosts:
    """What computes, and what is between. scaling: the share of `cores` times a core's speed that
    a host has. network: None between programs that the Core's loopback connects."""

    core: Core
    cores: int = 1
    scaling: float = 1.0
    network: Link | None = None

    @property
    def speed(self) -> float:
        return self.cores * self.scaling

    @property
    def link(self) -> Link:
        """The network cannot be used faster than gloo's one thread can, and its latency comes on
        top of gloo's own."""
        if self.network is None:
            return self.core.transport
        return Link(
            min(self.network.bytes_per_s, self.core.transport.bytes_per_s),
            self.network.latency + self.core.transport.latency,
        )
