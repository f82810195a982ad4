"""`docs/models.md`, of what a run found: counts first, then names by what became of them."""

import re
from collections import defaultdict
from typing import Any

Families = dict[str, dict[str, Any]]
LIBRARIES = ("transformers", "timm", "diffusers")
OUTCOMES = {
    "right": "right",
    "part": "right, some attention left",
    "stays": "stays as it was",
    "refused": "refused",
    "wrong": "wrong",
    "crashed": "crashed",
    "not done": "not done",
    "not built": "not built",
}
_LEFT = re.compile(r"the attention of [\w, ]+ is written out in its own code and not exchanged")
_KNOWN = re.compile(r"[\w.]+ (is no layer that qkv knows|is a subclass of .*)")


def page(run: dict[str, Any], lower: dict[str, Any]) -> str:
    """lower: the run with the oldest transformers that qkv supports."""
    about, families = run["about"], run["families"]
    versions = ", ".join(f"{x} {about[x]}" for x in LIBRARIES)
    parts = [HEAD.format(versions=versions, torch=about["torch"], isa=about["isa"])]
    parts += [_counts(families), *_elsewhere(families), CHECKED, _checks(families)]
    parts += _older(families, lower)
    for outcome, title in OUTCOMES.items():
        found = {n: x for n, x in families.items() if _outcome(x) == outcome}
        if found:
            parts += [f"## {title.capitalize()}", _TEXT[outcome], _by_why(found, outcome)]
    return "\n\n".join(parts) + "\n"


def _elsewhere(families: Families) -> list[str]:
    """What is of a run with another version of transformers."""
    counts: dict[str, int] = defaultdict(int)
    for found in families.values():
        if "transformers" in found:
            counts[found["transformers"]] += 1
    return [ELSEWHERE.format(version=x, count=count) for x, count in counts.items()]


def _older(families: Families, lower: dict[str, Any]) -> list[str]:
    """How the run with the oldest transformers differs, of the families that are in both."""
    version, older = lower["about"]["transformers"], lower["families"]
    both = sorted(families.keys() & older.keys())
    same = sum(_outcome(families[x]) == _outcome(older[x]) for x in both)
    rows = [
        f"| `{x}` | {OUTCOMES[_outcome(older[x])]} | {OUTCOMES[_outcome(families[x])]} |"
        for x in both if _outcome(families[x]) != _outcome(older[x])
    ]  # fmt: skip
    text = OLDER.format(version=version, tried=len(older), both=len(both), same=same)
    table = "\n".join([f"| family | with {version} | here |", "|---|---|---|", *rows])
    return [f"## With transformers {version}", text, *([table] if rows else [])]


def worse(then: Families, now: Families) -> list[str]:
    """The families that were right, and are not."""
    bad = ("wrong", "crashed", "refused", "stays")
    return [
        name for name, x in now.items()
        if x["outcome"] in bad and then.get(name, {}).get("outcome") == "right"
    ]  # fmt: skip


def _outcome(found: dict[str, Any]) -> str:
    return "part" if found["outcome"] == "right" and found["why"] else found["outcome"]


def _library(name: str) -> str:
    library = name.partition(":")[0]
    return library if library in LIBRARIES else "transformers"


def _counts(families: Families) -> str:
    rows = [f"| | {' | '.join(LIBRARIES)} |", "|---|" + "--:|" * len(LIBRARIES)]
    for outcome, title in OUTCOMES.items():
        found = [_library(n) for n, x in families.items() if _outcome(x) == outcome]
        rows.append(f"| {title} | " + " | ".join(str(found.count(x)) for x in LIBRARIES) + " |")
    rows.append("| all | " + " | ".join(
        str(sum(_library(n) == x for n in families)) for x in LIBRARIES) + " |")  # fmt: skip
    return "\n".join(rows)


def _checks(families: Families) -> str:
    counts: dict[str, int] = defaultdict(int)
    for found in families.values():
        for name, said in found.get("checks", {}).items():
            counts[name] += said == "ok" and found["outcome"] == "right"
    rows = ["| held against the model as it was | families |", "|---|--:|"]
    return "\n".join(rows + [f"| {name} | {count} |" for name, count in counts.items()])


def _by_why(found: Families, outcome: str) -> str:
    if outcome in ("right", "not built"):
        return _names(found)
    groups: dict[str, list[str]] = defaultdict(list)
    for name, x in found.items():
        groups[_reason(x["why"], outcome)].append(name)
    rows = [
        f"| {why} | {_names(names)} |"
        for why, names in sorted(groups.items(), key=lambda x: (-len(x[1]), x[0]))
    ]
    return "\n".join(["| why | families |", "|---|---|", *rows])


def _reason(why: str, outcome: str) -> str:
    """The same words for the same reason: names of classes are left out."""
    if outcome in ("stays", "part"):
        found = {"its own code makes the weights": _LEFT.search(why)}
        found["a layer that qkv does not know"] = _KNOWN.search(_LEFT.sub("", why))
        named = [reason for reason, match in found.items() if match]
        why = named[0] if named else why
    why = re.sub(r" in [^ ]*\.py:\d+", "", why)
    return why.replace("|", "\\|").replace("<", "\\<")[:200]


def _names(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


HEAD = """# Models that were tried

`python -m benchmarks.models_tried` builds a small model of each family of {versions},
with random weights, has [`qkv.convert`](adopt.md) change it, and holds it against the same model as
it was, with "eager" attention. This page is what it printed, on torch {torch} and `{isa}`; the raw
results are in `benchmarks/results`, and each commit tries a part of the families again. A family is
a model type of transformers, a module of timm that has attention, or a class of diffusers. Small
models have few layers, heads and tokens: this is about numbers, and not about speed. Here qkv also
takes attention that is [written out](adopt.md#attention-written-out) and so small that
it would stay as it is."""
CHECKED = """Right is a family of which each of these holds that its models have at all: outputs,
and each gradient by its own size, in float32; the weights that `output_attentions=True` returns; in
bfloat16 errors against float32 of at most twice those of the model as it was; gradient
checkpointing in training; logits of generated tokens, with padding on the left, and scores of
beams. Where transformers' own "sdpa" means something else than "eager", that is what counts."""
ELSEWHERE = """{count} of these families are of a run with transformers {version}, and were not
tried again: timm's and diffusers', those that could not be built, and some others."""
OLDER = """The oldest version of transformers that qkv supports: {tried} families were tried with
it, none
of which was wrong. Of the {both} that are on this page too, {same} came to the same."""
_TEXT = {
    "right": "All attention that a call runs through is qkv's.",
    "part": "What qkv computes is right; other attention of the model stayed as it was.",
    "stays": """Nothing of these was changed, or nothing that a call runs through. Longformer, and
LED's
encoder above, write a window's scores as overlapping chunks, with other projections for global
tokens: no product of theirs is queries times keys. VITS needs its weights for positions of its
values too. SEW-D's softmax is a derivative of its own, in an `autograd.Function`, and WavLM calls
torch's function for a whole layer, weights included: neither shows its steps.""",
    "refused": "`NotImplementedError` in the first call.",
    "wrong": 'Use "eager" for these.',
    "crashed": "Their process ended, with qkv or before it came to that.",
    "not done": "What is small by its config took too long, with qkv or before it came to that.",
    "not built": """Nothing is known of these: no small config was found, or no call. Why stands
in the raw results.""",
}
