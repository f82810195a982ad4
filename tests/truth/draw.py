"""Sizes, numbers and strides of the tensors of a call, each as a Python expression."""

import math
import random

import torch

SUFFIX = {
    torch.float32: ".float()", torch.float64: "", torch.bfloat16: ".bfloat16()",
    torch.float16: ".half()",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
# Of a score and the numbers of its batch item, head, query and key; table [H, 7].
FUNCTIONS = (
    "s + table[h, (q - k) % 7]",
    "s * torch.sigmoid(table[h, k % 7]) + table[h, q % 7]",
    "2 * torch.tanh(s) + s / 3 - 0.1 * (q - k).abs()",
    "torch.where((q - k) % 3 != 1, s, -math.inf)",
    "torch.where((q // 4 == k // 4) | (k < 3), torch.minimum(s, table[h, b % 7]), s * 0.5)",
    "torch.where(q >= k, s + table[h, 3] * torch.sin(k * 0.3), -math.inf)",
)
LAYOUTS = ("plain",) * 5 + ("transposed", "column_major", "sliced", "expanded")


class Draw:
    """Draws one call from a seed, and keeps what it has drawn: tensors and keywords of call.Call,
    and tags, which say what the numbers are like."""

    def __init__(self, seed, operator):
        self.random = random.Random(f"{operator} {seed}")
        self.tensors, self.keywords, self.tags = {}, {}, []
        self.dtype = self.pick({
            torch.float32: 14, torch.float64: 2, torch.bfloat16: 2, torch.float16: 2
        })  # fmt: skip

    # --- choices ---

    def pick(self, weights):
        """A key of {key: weight}, or an element of a sequence."""
        if isinstance(weights, dict):
            return self.random.choices([*weights], [*weights.values()])[0]
        return self.random.choice(weights)

    def chance(self, p):
        return self.random.random() < p

    def between(self, low, high):
        return self.random.randint(low, high)

    def length(self, most=300):
        """A number of queries or keys: mostly small, now and then none, or above the thresholds at
        which tiles and threads matter."""
        kind = self.pick({"none": 3, "few": 25, "some": 45, "more": 19, "many": 8})
        low, high = {
            "none": (0, 0), "few": (1, 3), "some": (4, 20), "more": (21, 40), "many": (130, 300)
        }[kind]  # fmt: skip
        return min(most, self.between(low, high))

    def seed(self):
        return self.between(0, 2**31)

    def broadcast(self, shape, keep=0):
        """A shape that broadcasts to `shape`; its last `keep` dimensions stay."""
        lead = len(shape) - keep
        cut = self.between(0, lead) if self.chance(0.3) else 0
        return tuple(
            1 if n + keep < len(shape) and self.chance(0.25) else size
            for n, size in enumerate(shape)
        )[cut:]

    # --- numbers ---

    def mood(self):
        """What is peculiar about the numbers of a call."""
        mood = self.pick({
            "ordinary": 10, "mean": 4, "offset": 3, "scores": 4, "tiny": 1, "integers": 1
        })  # fmt: skip
        self.tags.append(mood)
        return mood

    def numbers(self, shape, role, mood):
        """float64 [shape], as text. role: query, key, value or another name."""
        text = f"normal({', '.join(map(str, (self.seed(), *shape)))})"
        if mood == "mean" and role == "key" and len(shape):
            return f"({text} + {self.pick((3, 10))} * normal({self.seed()}, {shape[-1]}))"
        if mood == "offset" and role in self.offset_roles:
            return f"({text} + {30 if self.dtype in HALVES else 1000})"
        if mood == "scores" and role == "query":
            return f"({text} * {self.magnitude:g})"
        if mood == "tiny" and role in ("query", "value"):
            return f"({text} * 1e-3)"
        if mood == "integers" and role in ("query", "key", "value"):
            return f"{text}.round()"
        return text

    def start_numbers(self):
        """The call's mood, with the sizes that go with it."""
        mood = self.mood()
        self.offset_roles = self.pick([("key",), ("value",), ("key", "value"), ("query", "key")])
        self.magnitude = 10 ** self.random.uniform(1, 3.5 if self.dtype in HALVES else 6)
        return mood

    def tensor(self, name, shape, mood="ordinary", role=None, dtype=None, layouts=LAYOUTS):
        """Adds a floating tensor."""
        dtype, role = dtype or self.dtype, role or name
        layout = self.pick(layouts) if len(shape) >= 2 else "plain"
        make = lambda *sizes: self.numbers(sizes, role, mood) + SUFFIX[dtype]  # noqa: E731
        if layout == "transposed" and len(shape) >= 3:
            text = make(*shape) + ".transpose(-2, -3).contiguous().transpose(-2, -3)"
        elif layout == "column_major":
            text = make(*shape) + ".mT.contiguous().mT"
        elif layout == "sliced":
            *lead, rows, columns = shape
            text = make(*lead, 2 * rows + 1, columns + 3) + f"[..., 1::2, 2:{2 + columns}]"
        elif layout == "expanded" and len(shape) >= 3 and 0 not in shape:
            dim = self.between(0, len(shape) - 3)
            text = make(*shape[:dim], 1, *shape[dim + 1 :]) + f".expand{(*shape,)}"
        else:
            text = make(*shape)
        self.tensors[name] = text

    def mask(self, name, shape, kind):
        """Adds a keyword: kind is "bool", or "same" or "f32", a floating mask of this dtype."""
        seed, p = self.seed(), self.pick((-1.5, -1.0, -0.5, 0.5))
        hidden = f"normal({', '.join(map(str, (seed, *shape)))}) < {p}"
        if kind == "bool":
            text = hidden.replace("<", ">")
        else:
            dtype = self.dtype if kind == "same" else torch.float32
            least = "-math.inf"
            if dtype == torch.float32 and name == "attn_mask" and self.chance(0.1):
                least = "torch.finfo(torch.float32).min"
            text = f"normal({', '.join(map(str, (self.seed(), *shape)))}){SUFFIX[dtype]}"
            if self.chance(0.7):
                text += f".masked_fill({hidden}, {least})"
        self.tensors[name] = text
        self.keywords[name] = name

    def spans(self, shape, keys):
        """Adds the keyword: one to three spans, some of them empty, for each of [..., L]."""
        pairs = (*shape, self.between(1, 3), 2)
        generator = f"generator=torch.Generator().manual_seed({self.seed()})"
        text = f"torch.randint({keys + 1}, {pairs}, {generator}, dtype=torch.int32)"
        self.tensors["spans"] = f"{text}.sort(-1).values.flatten(-2)"
        self.keywords["spans"] = "spans"

    def indices(self, shape, keys):
        """Adds the keyword: [..., L, k] keys, out of all or out of every fifth, some of them none
        or named twice."""
        step = self.pick((1, 5))
        generator = f"generator=torch.Generator().manual_seed({self.seed()})"
        text = f"torch.randint(-1, {(keys - 1) // step + 1}, {shape}, {generator})"
        self.tensors["indices"] = f"({text} * {step}).clamp(min=-1)" + self.pick(("", ".int()"))
        self.keywords["indices"] = "indices"

    def of_heads(self, name, shape):
        """Adds slopes or sinks as a keyword."""
        dtype = self.pick((torch.float32, torch.float32, torch.float64, torch.bfloat16))
        sizes = ", ".join(map(str, (self.seed(), *shape)))
        text = f"(normal({sizes}) / 4)" if name == "alibi_slopes" else f"(normal({sizes}) * 2)"
        if name == "sinks" and self.chance(0.2):
            text = f"{text}.masked_fill(normal({sizes}) < -0.8, -math.inf)"
        self.tensors[name] = text + SUFFIX[dtype]
        self.keywords[name] = name

    def scores(self, L, S):
        """Adds what changes the scores but no tensors."""
        k = self.keywords
        if self.chance(0.35):
            sides = (-1, 0, 1, 2, 5, S // 2, L // 2, L + S)
            k["window_size"] = f"({self.pick(sides)}, {self.pick(sides)})"
        if self.chance(0.2):
            k["softcap"] = self.pick(("0.5", "3.0", "50.0"))
        if self.chance(0.25):
            k["scale"] = self.pick(("0.25", "-0.7", "0.0", "1.0", "2.0"))

    def function(self, H):
        """Adds a score_mod, and the table that it reads; returns facts for the truth."""
        if not self.chance(0.3):
            return {}
        body = self.pick(FUNCTIONS)
        if "table" in body:
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            self.tensor("table", (H, 7), dtype=dtype, layouts=("plain", "transposed", "sliced"))
        text = f"lambda s, b, h, q, k: {body}"
        self.keywords["score_mod"] = text
        return {"function": text}

    def dropout(self):
        if self.chance(0.25):
            self.keywords["dropout_p"] = self.pick(("0.1", "0.5", "0.5", "1.0"))

    def order(self, second=0.4):
        """Of derivatives: mostly the first, second ones for a good share."""
        if self.chance(0.1):
            return 0
        return 2 if self.chance(second) else 1

    def grow(self, shape, bound=2_000_000):
        """Whether the work of a shape is below the bound."""
        return math.prod(max(1, n) for n in shape) <= bound
