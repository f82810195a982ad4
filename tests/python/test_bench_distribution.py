"""python -m benchmarks.distribution: its arithmetic, on figures that are made up. How long anything
takes is not tested."""

import dataclasses
import json

import pytest
import torch
from bench_runs import PNG, refused

from benchmarks.distribution import __main__ as model
from benchmarks.distribution import table
from benchmarks.distribution.cost import Split, efficiency, ideal, parts_of, predict, splits
from benchmarks.distribution.figures import Core, Hosts, Layer, Link, Pass
from benchmarks.distribution.fit import fit, nonnegative
from benchmarks.distribution.measure import measure
from qkv.distributed._passes import parts_of_both
from qkv.distributed._plan import Plan

LAYER = Layer(heads=4, kv_heads=2, head_dim=8, itemsize=2)
FREE = Link(1e18, 0.0)  # transport that takes no time
FLOP = 1e-9


def core(fixed=0.0, element=0.0, transport=FREE, transport_cpu=0.0, causal=1.0):
    passes = (Pass(fixed, element, flop, causal) for flop in (FLOP, 2 * FLOP))
    return Core(*passes, transport, transport_cpu)


def operations(pairs):
    """Seconds of forward and of backward."""
    return 4 * pairs * 4 * 8 * FLOP, 10 * pairs * 4 * 8 * 2 * FLOP


def test_one_rank_only_computes():
    """In one call, so that there is nothing to merge."""
    hosts = Hosts(core(fixed=0.5, element=1e-3, transport=Link(1.0, 1.0), transport_cpu=1.0))
    computing = sum(operations(64**2 / 2))
    assert ideal(LAYER, 64, 1, hosts) == pytest.approx(computing)
    found = predict(LAYER, 64, Split(1, 1), hosts)
    assert found == pytest.approx(computing + 2 * 0.5)


@pytest.mark.parametrize("ranks", [2, 5, 64])
def test_zigzag_halves_every_step(ranks):
    """Without transport and fixed costs it is ideal; without zigzag, the last rank has all pairs of
    each step but the first. The longer sequence travels in parts."""
    hosts = Hosts(core(), cores=4, scaling=0.5)
    for tokens in (640, 640 << 13):
        assert efficiency(LAYER, tokens, Split(1, ranks), hosts) == pytest.approx(1)
        plain = efficiency(LAYER, tokens, Split(1, ranks), hosts, is_zigzag=False)
        assert plain == pytest.approx(ranks / (2 * ranks - 1))


def test_parts_share_the_bytes_and_each_has_its_own_cost():
    """Two ranks of 2**16 tokens: keys and values are two parts of the heads, each of two cuts."""
    hosts = Hosts(Core(Pass(1.0, 0, 0), Pass(1.0, 0, 0), Link(1e5, 0.0), 0.0))
    rows = 2**16
    assert parts_of(2, 2 * rows * 2 * 8 * 2) == (2, 2)
    keys, gradients = (2 * rows * 8 * size / 2 / 1e5 for size in (2, 4))  # seconds of a message
    assert 1 < keys < 2 * keys == gradients
    # Each of the four messages comes during the visit before its own, and its gradients go home
    # during the one after: the last ones of a part beside the next part's first keys, or alone.
    first_part = keys + keys + gradients
    backward = first_part + (gradients + keys) + keys + gradients + gradients
    expected = 2 * (keys + keys + 1.0) + backward
    assert predict(LAYER, 2 * rows, Split(1, 2), hosts) == pytest.approx(expected)


def test_the_first_step_of_a_ring_is_causal():
    """One of four steps; with all heads divided, all there is."""
    hosts = Hosts(core(causal=1.4))
    computing = sum(operations(64**2 / 2)) / 4
    assert predict(LAYER, 64, Split(1, 4), hosts) == pytest.approx(computing * (3 + 1.4) / 4)
    assert predict(LAYER, 64, Split(4, 1), hosts) == pytest.approx(computing * 1.4)


def test_transport_is_what_takes_longer():
    """Three ranks of 32 tokens; nothing but transport takes time."""
    hosts = Hosts(Core(Pass(0, 0, 0), Pass(0, 0, 0), Link(1e6, 1e-3), 0.0))
    keys, gradients = 2 * 32 * 2 * 8 * 2, 2 * 32 * 2 * 8 * 4
    agreement = 2 * 1e-3
    # Keys for the second and for the third step; backward the gradients of the second step go home
    # during the third, and those of the third alone.
    messages = [keys, keys, keys, keys, gradients, gradients]
    expected = agreement + sum(1e-3 + bytes / 1e6 for bytes in messages)
    assert predict(LAYER, 96, Split(1, 3), hosts) == pytest.approx(expected)


def test_transport_hides_behind_computing_and_takes_its_share_of_the_cores():
    hosts = Hosts(core(transport=Link(1e8, 0.0), transport_cpu=1e-8), cores=4, scaling=0.5)
    forward, backward = (seconds / 2 for seconds in operations(1024**2 / 2))  # of a step
    keys, gradients = 2 * 1024 * 2 * 8 * 2, 2 * 1024 * 2 * 8 * 4
    expected = 2 * forward + 2 * backward + 2 * keys * 1e-8 / 4  # while the second step's come
    expected += gradients / 1e8  # behind which nothing is left to compute
    assert predict(LAYER, 2048, Split(1, 2), hosts) == pytest.approx(expected)


def test_nothing_hides_the_all_to_alls():
    hosts = Hosts(core(transport=Link(1e6, 1e-3)))
    features = 2 * (4 + 2) * 8  # query and output, key and value
    local = 64 / 2 * features * 2
    expected = 2 * local / 2 / 1e6  # half of it stays, forward and backward
    messages = 1 + 5 + 4  # with that by which the ranks compare their arguments
    computing = sum(operations(64**2 / 2)) / 2
    assert predict(LAYER, 64, Split(2, 1), hosts) == pytest.approx(
        expected + messages * 1e-3 + computing
    )


def test_heads_of_keys_that_are_fewer_than_ranks_travel_to_all_that_need_them():
    hosts = Hosts(core(transport=Link(1e6, 0.0)))
    features = 2 * (4 + 4) * 8  # two heads of keys and of values, each on two of four ranks
    expected = 2 * 64 / 4 * features * 2 * 3 / 4 / 1e6 + sum(operations(64**2 / 2)) / 4
    assert predict(LAYER, 64, Split(4, 1), hosts) == pytest.approx(expected)


def test_both_are_a_ring_of_longer_shards_with_fewer_heads():
    hosts = Hosts(core(fixed=1.0))
    four = predict(LAYER, 64, Split(2, 2), hosts)
    assert four == pytest.approx(sum(operations(64**2 / 2)) / 4 + 4 * 1.0)
    assert predict(LAYER, 64, Split(1, 4), hosts) == pytest.approx(four + 4 * 1.0)


def test_a_network_is_no_faster_than_gloo():
    hosts = Hosts(core(transport=Link(2e9, 5e-5)), network=Link(12.5e9, 2e-5))
    assert hosts.link == Link(2e9, pytest.approx(7e-5))
    slow = Hosts(core(transport=Link(2e9, 5e-5)), network=Link(1.25e9, 2e-5))
    assert slow.link.bytes_per_s == 1.25e9


def test_splits():
    assert [str(split) for split in splits(8, LAYER)] == ["1×8", "2×4", "4×2"]
    assert [str(split) for split in splits(6, Layer(6, 4, 8))] == ["1×6", "2×3"]  # not 4 by 3 or 6


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_pairs_and_keys_are_those_of_the_plan(ranks):
    """Half of the pairs in each step of each rank, and all keys in some step of every kind."""
    chunk = 6
    rows = 2 * chunk
    plan = Plan(ranks, chunk, ranks * rows, is_causal=True, positions=False)
    for step in range(1, ranks):
        keys = []
        for rank in range(ranks):
            found = plan.step(rank, (rank - step) % ranks)
            (block,) = found.blocks
            assert not block.is_causal
            assert block.rows.size * block.columns.size == rows**2 / 2
            keys.append(sum(columns.size for columns in found.columns))
        assert max(keys) == rows
    for rank in range(ranks):
        (block,) = plan.step(rank, rank).blocks
        assert block.is_causal and block.rows.size == block.columns.size == rows


@pytest.mark.parametrize("heads", [1, 2, 6, 8])
@pytest.mark.parametrize("rows", [256, 4096, 1 << 17, 1 << 20])
def test_parts_are_those_of_the_ring(heads, rows):
    keys = torch.empty(1, heads, rows, 64, device="meta")
    assert parts_of(heads, 2 * keys.numel() * 4) == parts_of_both(keys, keys)


def samples_of(core, layer):
    for name, block in (("forward", core.forward), ("backward", core.backward)):
        for rows in (256, 512, 1024):
            elements, moved = rows * layer.heads * layer.head_dim, 1000.0 * rows
            count = {"forward": 4, "backward": 10}[name]
            compute = (
                block.fixed + elements * block.element + count * rows / 2 * elements * block.flop
            )
            transport = core.transport.latency + moved / core.transport.bytes_per_s
            both = max(compute + core.transport_cpu * moved, transport)
            yield {
                "pass": name,
                "rows": rows,
                "bytes": moved,
                "compute": compute,
                "own": block.causal * compute,
                "transport": transport,
                "both": both,
            }


def test_fit_finds_what_samples_are_made_of():
    made = core(
        fixed=1e-3, element=1e-8, transport=Link(2e9, 1e-4), transport_cpu=2e-10, causal=1.2
    )
    layer = Layer(4, 4, 16)
    found = fit(list(samples_of(made, layer)), layer)
    for one, other in zip(flat(found), flat(made), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def flat(core):
    for value in dataclasses.asdict(core).values():
        yield from value.values() if isinstance(value, dict) else [value]


def test_no_term_is_negative():
    falling = [([1.0, x], 2 - x) for x in (0.1, 0.5, 0.9)]
    fixed, slope = nonnegative(falling)
    assert slope == 0 and 1 < fixed < 2


def figures():
    made = core(fixed=1e-4, element=1e-9, transport=Link(2e9, 1e-4), transport_cpu=2e-10)
    layer = Layer(4, 4, 128)
    return {
        "machine": "A machine",
        "layer_measured": dataclasses.asdict(layer),
        "samples": list(samples_of(made, layer)),
        "whole": [
            {"method": method, "ranks": ranks, "tokens": 512 * ranks,
             "seconds": predict(layer, 512 * ranks, split, Hosts(made)) / 1.25}
            for method, ranks, split in (
                ("ring", 1, Split(1, 1)), ("ring", 2, Split(1, 2)), ("heads", 2, Split(2, 1))
            )
        ],
        "core": dataclasses.asdict(made),
    }  # fmt: skip


def test_figures_predict(tmp_path, capsys):
    """The command, on figures that a run has written before."""
    (tmp_path / "figures.json").write_text(json.dumps(figures()))
    model.main(
        ["--figures", str(tmp_path / "figures.json"), "--network", "25", "--heads", "16",
         "--json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "run.png")]
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert printed.startswith("A machine\n") and "25 Gbit/s, 20 µs" in printed
    assert printed.count("+25.0%") == 3  # what was measured is as much less than what is predicted
    run = json.loads((tmp_path / "run.json").read_text())
    (cells,) = run["efficiency"].values()
    assert len(cells) == len(table.TOKENS) * len(table.HOSTS)
    for cell in cells:
        found = [cell[name] for name in ("ring", "plain", "heads", "both") if cell[name]]
        assert all(0 < efficiency < 1 for efficiency in found)
        assert (cell["heads"] is not None) == (cell["hosts"] <= 16)
        assert (cell["both"] is not None) == (cell["hosts"] > 2)
        assert cell["ring"] > cell["plain"] or cell["hosts"] == 1024
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


@pytest.mark.long
def test_measuring():
    """What two ranks measure has what is needed."""
    found = measure(8, torch.bfloat16, lengths=(8, 16), repeats=1)
    assert found["layer_measured"] == {"heads": 4, "kv_heads": 4, "head_dim": 8, "itemsize": 2}
    assert [(s["pass"], s["rows"], s["bytes"]) for s in found["samples"]] == [
        ("forward", 8, 2 * 4 * 8 * 8 * 2), ("backward", 8, 2 * 4 * 8 * 8 * (2 + 4)),
        ("forward", 16, 2 * 4 * 16 * 8 * 2), ("backward", 16, 2 * 4 * 16 * 8 * (2 + 4)),
    ]  # fmt: skip
    assert all(s[name] > 0 for s in found["samples"] for name in ("compute", "transport", "both"))
    assert [(w["method"], w["ranks"], w["tokens"]) for w in found["whole"]] == [
        ("ring", 1, 8), ("ring", 2, 16), ("heads", 2, 16),
        ("ring", 1, 16), ("ring", 2, 32), ("heads", 2, 32),
    ]  # fmt: skip
    assert all(whole["seconds"] > 0 for whole in found["whole"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--cores 0", "--cores: expected more than 0, got 0"),
        ("--network 10 0", "--network: expected more than 0, got [10.0, 0.0]"),
        ("--scaling 2", "--scaling: expected 1 or less, got 2.0"),
        ("--kv-heads 5", "--kv-heads: expected a divisor of 32, got 5"),
        ("--figures no.json", "--figures: there is no file no.json"),
        ("--json no/run.json", "--json: there is no folder no"),
        ("--dtype float8", "--dtype: invalid choice: 'float8'"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert message in refused(capsys, model.main, *arguments.split())
