"""What failed, as Python that stands alone: the call, its derivative, and the number expected."""

AUX = "from torch.nn.attention.varlen import AuxRequest\n"


def snippet(case, failure, isa):
    """The program."""
    call = case.call
    lines = [call.source(), f'qkv.set_isa("{isa}")', "torch.set_num_threads(1)", ""]
    lines += derivative(case, failure.name.split(" "))
    if failure.threads:
        lines += [
            "", "one = compute()", f"torch.set_num_threads({failure.threads})",
            "for _ in range(100):",
            "    assert torch.equal(compute().nan_to_num(1e30), one.nan_to_num(1e30))",
        ]  # fmt: skip
    elif failure.place or failure.expected == failure.expected:
        place = ", ".join(map(str, failure.place))
        number = f"compute()[{place}].item()" if place else "compute().item()"
        expected, allowed = f"{failure.expected!r}", f"{failure.allowed:.3g}"
        lines += [
            "", f"got, expected = {number}, {expected}".replace("-inf", "-math.inf"),
            f'print("got", got, "expected", expected, "within", {allowed})',
            f"assert got == expected or abs(got - expected) <= {allowed}",
        ]  # fmt: skip
    text = "\n".join(lines)
    for name, line in (("AuxRequest", AUX), ("math.", "import math\n")):
        text = text if name in text.replace(line, "") else text.replace(line, "")
    return text + "\n"


TUPLE = "results = results if isinstance(results, tuple) else (results,)"


def derivative(case, name):
    """Lines that define compute(), which returns the tensor of this name: ["lse"], ["grad",
    "query"], ["second", "grad_output"], ["tangent", "output"]."""
    call, listed = case.call, ", ".join(case.leaves)
    if name[0] in ("grad", "second"):
        body = gradient(case, *name)
    elif name[0] == "tangent":
        body = [
            f"leaves = tuple(x.clone() for x in ({listed},))",
            f"results = torch.func.jvp(call, leaves, ({directions(case)},))[1]",
            TUPLE,
            f"return results[{call.results.index(name[1])}]",
        ]
    else:
        body = [f"results = call({listed})", TUPLE]
        body += [f"return results[{call.results.index(name[0])}]"]
    return ["def compute():", *("    " + line for line in body)]


def gradient(case, order, name):
    """The body of compute() for a gradient of the first or the second order."""
    leaves, results = [*case.leaves], case.call.results
    lines = [
        f"leaves = [x.detach().requires_grad_() for x in ({', '.join(leaves)},)]",
        "results = call(*leaves)", TUPLE, f"({', '.join(results)},) = results",
    ]  # fmt: skip
    for x in case.cotangents:
        numbers = f"normal({case.seeds[x]}, *{x}.shape).add({case.offset}).to({x}.dtype)"
        lines.append(f"grad_{x} = {numbers}.requires_grad_()")
    pairs = ", ".join(f"({x}, grad_{x})" for x in case.cotangents)
    more = ", allow_unused=True" + (", create_graph=True" if order == "second" else "")
    lines += [
        f"pairs = [(y, g) for y, g in [{pairs}] if y.requires_grad]",
        "outputs, seeds = zip(*pairs)",
        f"found = torch.autograd.grad(outputs, leaves, seeds{more})",
    ]
    if order == "grad":
        return [*lines, f"return found[{leaves.index(name)}]"]
    of = f"leaves[{leaves.index(name)}]" if name in leaves else name
    return [
        *lines, f"used = [(g, t) for g, t in zip(found, ({directions(case)},)) if g is not None]",
        "gradients, directions = zip(*[(g, t) for g, t in used if g.requires_grad])",
        f"return torch.autograd.grad(gradients, {of}, directions)[0]",
    ]  # fmt: skip


def directions(case):
    return ", ".join(f"normal({case.seeds[n]}, *{n}.shape).to({n}.dtype)" for n in case.directions)
