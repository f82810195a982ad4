"""An imitation of the parts of vLLM 0.33 that qkv.integrations.vllm is written for, since its wheel
for CPUs is not on PyPI: names, signatures and fields are vLLM's, and nothing is computed. Beside it
an engine that lays pages out, and tells a backend of a batch, as vLLM's does."""

import dataclasses
import enum
import sys
from abc import ABC, abstractmethod
from types import ModuleType
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


class AttentionMetadataBuilder(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
        attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ): ...  # fmt: skip

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None,
        output_block_scale=None,
    ): ...  # fmt: skip


class CPUAttentionBackend(ABC):
    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes = ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]

    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @classmethod
    def get_supported_head_sizes(cls):
        return [32, 64]

    @classmethod
    def supports_sink(cls):
        return False

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...


class CPUMLABackend(ABC):
    @staticmethod
    def get_name():
        return "CPU_MLA"

    @classmethod
    def get_supported_head_sizes(cls):
        return [576]

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...


class CPUMLAImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, kv_lora_rank):
        self.scale, self.kv_lora_rank = scale, kv_lora_rank


OVERRIDES = {}


class AttentionBackendEnum(enum.Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CPU_MLA = "vllm.v1.attention.backends.mla.cpu_mla.CPUMLABackend"

    def get_path(self):
        return OVERRIDES.get(self, self.value)


def register_backend(backend, class_path=None, is_mamba=False):
    OVERRIDES[backend] = class_path


HOMES = {
    "": (),
    ".v1": (),
    ".v1.attention": (),
    ".v1.attention.backend": (
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
    ),
    ".v1.attention.backends": (),
    ".v1.attention.backends.cpu_attn": (CPUAttentionBackend,),
    ".v1.attention.backends.mla": (),
    ".v1.attention.backends.mla.cpu_mla": (CPUMLABackend, CPUMLAImpl),
    ".v1.attention.backends.registry": (AttentionBackendEnum, register_backend),
}


def install(monkeypatch):
    """For one test; whatever was imported with it is imported anew in the next."""
    for name, members in HOMES.items():
        module = ModuleType(f"vllm{name}")
        vars(module).update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, f"vllm{name}", module)
    OVERRIDES.clear()


class Engine:
    """Requests and their pages, for one layer."""

    def __init__(self, backend, layer, dtype, heads, head_size, block_size=4, blocks=64):
        self.layer, self.size = layer, block_size
        self.builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))
        shape = blocks, heads, block_size, 2 * head_size
        self.cache = torch.full(shape, float("nan")).to(dtype)  # nothing else may be read
        self.free = torch.randperm(blocks).tolist()
        self.tables, self.lengths = {}, {}

    def share(self, name, other, tokens):
        """A new request begins with the pages of another's first tokens."""
        assert tokens % self.size == 0
        self.tables[name] = self.tables[other][: tokens // self.size]
        self.lengths[name] = tokens

    def batch(self, counts):
        """What vLLM says of a batch with so many new tokens of each request."""
        slots = []
        for name, count in counts.items():
            table = self.tables.setdefault(name, [])
            begin = self.lengths.get(name, 0)
            self.lengths[name] = begin + count
            while len(table) * self.size < self.lengths[name]:
                table.append(self.free.pop())
            rows = range(begin, begin + count)
            slots += [table[i // self.size] * self.size + i % self.size for i in rows]
        longest = max(len(self.tables[name]) for name in counts)
        tables = [
            self.tables[name] + [99999] * (longest - len(self.tables[name])) for name in counts
        ]
        lengths = torch.tensor([self.lengths[name] for name in counts], dtype=torch.int32)
        begins = torch.tensor([0, *counts.values()]).cumsum(0).int()
        return CommonAttentionMetadata(
            begins, lengths, len(counts), int(begins[-1]), max(counts.values()),
            int(lengths.max()), torch.tensor(tables, dtype=torch.int32), torch.tensor(slots),
        )  # fmt: skip

    def step(self, counts, query, key, value, padding=3):
        """One batch through the layer. vLLM pads its tensors, and gives what it pads no slot."""
        metadata = self.builder.build(0, self.batch(counts))
        query, key, value = (
            torch.cat([x, torch.full_like(x[:1], 7).expand(padding, -1, -1)])
            for x in (query, key, value)
        )
        slots = torch.cat([metadata.slot_mapping, torch.full((padding,), -1)])
        self.layer.do_kv_cache_update(None, key, value, self.cache, slots)
        output = torch.full_like(query, 5)
        found = self.layer.forward(None, query, key, value, self.cache, metadata, output)
        assert found is output and (output[len(query) - padding :] == 5).all()
        return output[: len(query) - padding]
