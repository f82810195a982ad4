"""What a trained model looks at: the softmax weights that attention itself never stores."""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

import qkv
from gpt.data import Corpus
from gpt.model import GPT, rotary_table

# A telling line says one name twice, such as `self.maxsize = maxsize`. It begins with one byte for
# its indentation (gpt.text).
TELLING_LINE = re.compile(rb"(?<=\n)[\x11-\x1a](self\.(?P<name>\w{5,}) = (?P=name))(?=\n)")
LONGEST_LINE = 44  # bytes; the tick labels of more cannot be read


def telling_line(corpus: Corpus) -> tuple[bytes, bytes]:
    """The longest telling line of held-out code that fits, without its indentation; and the code up
    to the end of that line."""
    text = corpus.validation.numpy().tobytes()
    fitting = [line for line in TELLING_LINE.finditer(text) if len(line[1]) <= LONGEST_LINE]
    if not fitting:
        raise ValueError("the held-out files have no line such as `self.name = name`")
    line = max(fitting, key=lambda line: len(line[1]))
    return line[1], text[: line.end()]


@dataclass(frozen=True)
class Mentions:
    """The two places of the name in a telling line."""

    first: int
    second: int
    length: int

    @classmethod
    def of(cls, line: bytes) -> "Mentions":
        first, equals = line.index(b".") + 1, line.index(b" = ")
        return cls(first, equals + 3, equals - first)

    def recall(self, maps: Tensor) -> Tensor:
        """How much of the second mention's attention goes to the first: a mean, [layers, heads]."""
        queries = slice(self.second, self.second + self.length)
        keys = slice(self.first, self.first + self.length)
        return maps[:, :, queries, keys].sum(-1).mean(-1)


@torch.no_grad()
def attention_maps(model: GPT, text: bytes) -> Tensor:
    """Weights [layers, heads, query, key] over the bytes of `text`, encoded as gpt.text does."""
    maps = []

    def record(module, args, _):
        query, key, _ = module.heads_of(*args[:2])
        maps.append(qkv.attention_weights(query, key, is_causal=True)[0])

    hooks = [block.attention.register_forward_hook(record) for block in model.blocks]
    try:
        model(torch.tensor([list(text)]), rotary_table(0, len(text), model.config.head_dim))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(maps)
