"""The processes over which a sequence is cut."""

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from qkv._refuse import refuse

Group = dist.ProcessGroup | DeviceMesh | None


class Ranks(NamedTuple):
    """A process group as one of its members sees it; without a group, that member alone.

    call: the number of the call that messages belong to. Ranks may run the backward passes of two
    calls in different orders, and then must not take the messages of one for those of the other.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    call: int = 0

    def name(self, rank: int) -> str:
        """What messages call a member: by its number among all processes of the job."""
        return "rank 0" if self.group is None else f"rank {dist.get_global_rank(self.group, rank)}"

    def tag(self, kind: int) -> int:
        """The number of this call's messages of one of two kinds, beyond those that programs are
        likely to give to messages of their own."""
        return 2**30 + (2 * self.call + kind) % 2**30

    def around(self, step: int) -> int:
        """The member so many places further on, in a ring."""
        return (self.rank + step) % self.size


ALONE = Ranks()


class Team(NamedTuple):
    """The ranks that share a sequence: `heads` times `ring` of them.

    The ring cuts the sequence into `ring.size` shares, and the ranks of `heads` cut each share once
    more. While they attend, each of the latter has the whole share for some of the heads.
    """

    heads: Ranks
    ring: Ranks

    def of_call(self, number: int) -> "Team":
        return Team(self.heads._replace(call=number), self.ring._replace(call=number))

    @property
    def size(self) -> int:
        return self.heads.size * self.ring.size

    @property
    def rank(self) -> int:
        """Which shard of the sequence is this process's: the shards of a share are neighbours."""
        return self.ring.rank * self.heads.size + self.heads.rank

    @property
    def all(self) -> list[Ranks]:
        """The groups over which something must be gathered, in turn, to come from every rank."""
        return [ranks for ranks in (self.heads, self.ring) if ranks.size > 1]


def team_of(function: str, group: Group) -> Team:
    """The team that a user names: all of its ranks in the ring, but for those of the first
    dimension of a mesh of two.

    Raises:
        TypeError: it is no group.
        ValueError: it is a mesh of three dimensions or more, or this process is not in it.
        RuntimeError: torch.distributed is not initialized.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"{function}: torch.distributed is not initialized; start the program with torchrun "
            'and call torch.distributed.init_process_group("gloo") first'
        )
    if isinstance(group, DeviceMesh):
        if group.ndim > 2:
            wanted = "one (ring) or two (heads, ring) are expected; mesh[names] takes a part of one"
            refuse("group", f"a mesh of {group.ndim} dimensions", wanted, function=function)
        if group.get_coordinate() is None:
            raise ValueError(f"{function}: this process is not in the mesh that group is")
        members = [_ranks_of(function, group.get_group(dim)) for dim in range(group.ndim)]
        return Team(*([ALONE] * (2 - len(members))), *members)
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        wanted = "a process group, a DeviceMesh or None, the default group, is expected"
        refuse("group", repr(group), wanted, TypeError, function)
    return Team(ALONE, _ranks_of(function, group))


def _ranks_of(function: str, group: Any) -> Ranks:
    if group == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ValueError(f"{function}: this process is not in the process group that group is")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))
