"""What failed, as Python that stands alone: the call, its derivative, and the number expected."""

AUX = "from torch.nn.attention.varlen import AuxRequest\n"


def snippet(case, failure, isa, threads=None):
    """The program. threads: those that differ from one thread, of a failure of bits."""
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


def derivative(case, name):
    """Lines that define compute(), which returns the tensor of this name: ["lse"], ["grad",
    "query"], ["second", "grad_output"], ["tangent", "output"]."""
    call, leaves = case.call, [*case.leaves]
    lines = ["def compute():"]
    add = lambda text: lines.append("    " + text)  # noqa: E731
    results = ", ".join(call.results)
    listed = ", ".join(leaves)
    if name[0] in call.results:
        add(f"results = call({listed})")
        add("results = results if isinstance(results, tuple) else (results,)")
        add(f"return results[{call.results.index(name[0])}]")
        return lines
    if name[0] not in ("grad", "second", "tangent"):
        return [*lines, f"    call({listed})", f"    return {name[0]}"]
    n = [call.results.index(x) for x in call.cotangents]
    add(f"leaves = [x.detach().requires_grad_() for x in ({listed},)]")
    if name[0] == "tangent":
        add(f"directions = [{directions(case)}]")
        add("f = lambda *x: call(*x)")
        add(
            "_, tangents = torch.func.jvp("
            "f, tuple(x.detach().clone() for x in leaves), tuple(directions))"
        )
        add("tangents = tangents if isinstance(tangents, tuple) else (tangents,)")
        add(f"return tangents[{call.results.index(name[1])}]")
        return lines
    add("results = call(*leaves)")
    add("results = results if isinstance(results, tuple) else (results,)")
    add(f"{results}{',' if len(call.results) == 1 else ''} = results")
    seeds = []
    for x in case.cotangents:
        seed = case.seeds[x]
        add(
            f"grad_{x} = normal({seed}, *{x}.shape).add({case.offset}).to({x}.dtype)"
            ".requires_grad_()"
        )
        seeds.append(x)
    del n
    add(
        f"pairs = [(y, g) for y, g in [{', '.join(f'({x}, grad_{x})' for x in seeds)}] "
        "if y.requires_grad]"
    )
    add("outputs, seeds = zip(*pairs)")
    create = ", create_graph=True" if name[0] == "second" else ""
    add(f"found = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True{create})")
    if name[0] == "grad":
        add(f"return found[{leaves.index(name[1])}]")
        return lines
    add(f"directions = [{directions(case)}]")
    add("used = [(g, t) for g, t in zip(found, directions) if g is not None and g.requires_grad]")
    add("gradients, directions = zip(*used)")
    add(
        f"return torch.autograd.grad(gradients, {name[1]}_leaf, directions)[0]".replace(
            f"{name[1]}_leaf", f"leaves[{leaves.index(name[1])}]" if name[1] in leaves else name[1]
        )
    )
    return lines


def directions(case):
    return ", ".join(f"normal({case.seeds[n]}, *{n}.shape).to({n}.dtype)" for n in case.directions)
