"""The example: its data, model and training, the comparison, and the command line."""

import dataclasses
import math
import re
import signal

import pytest
import torch
import torch.nn.functional as F

import train_gpt
from gpt import compare, timer, variants
from gpt.attention_map import Mentions, attention_maps, telling_line
from gpt.data import SKIPPED_FOLDERS, load_corpus, sample_batch
from gpt.generate import generate, timed
from gpt.model import (
    GPT,
    Int8Cache,
    ModelConfig,
    QkvCache,
    SelfAttention,
    TorchCache,
    TorchSelfAttention,
    load_attention,
    rotary_table,
    rotate,
)
from gpt.text import decode, encode
from gpt.timer import TimedAttention
from gpt.train import TrainConfig, Trainer, load_model
from gpt.variants import Variant

MODEL = ModelConfig(layers=2, heads=2, head_dim=16, context=48)
TRAIN = TrainConfig(steps=6, batch=2)
FLAGS = "--layers 2 --heads 2 --head-dim 16 --context 48 --batch 2".split()


@pytest.fixture(scope="module")
def corpus():
    return load_corpus()


@pytest.fixture(scope="module")
def trained(corpus):
    trainer = Trainer(MODEL, dataclasses.replace(TRAIN, steps=40), corpus, load_attention("qkv"))
    for _ in range(40):
        trainer.step()
    return trainer


# Data


def test_held_out_files_are_not_trained_on(corpus):
    assert corpus.train_files and corpus.validation_files
    assert not set(corpus.train_files) & set(corpus.validation_files)
    assert corpus.train.numel() > 10 * corpus.validation.numel() > 0
    folders = {part for name in corpus.train_files for part in name.split("/")[:-1]}
    assert not folders & SKIPPED_FOLDERS


def test_a_file_keeps_its_side_whatever_else_is_there(tmp_path, corpus):
    kept = corpus.validation_files[0], corpus.train_files[0]
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_bytes(b"not to be read")
    small = load_corpus(tmp_path)
    assert (small.validation_files, small.train_files) == ([kept[0]], [kept[1]])
    assert small.train.numpy().tobytes() == kept[1].encode()


def test_a_python_without_its_source_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected the source text .*, found 0 files"):
        load_corpus(tmp_path)


def test_batches_are_text_and_its_continuation(corpus):
    inputs, targets = sample_batch(corpus.train, 3, 20, seed=5)
    assert inputs.shape == targets.shape == (3, 20)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = corpus.train.numpy().tobytes()
    assert all(bytes(row) in text for row in torch.cat((inputs, targets[:, -1:]), 1).tolist())
    assert torch.equal(inputs, sample_batch(corpus.train, 3, 20, seed=5)[0])
    assert not torch.equal(inputs, sample_batch(corpus.train, 3, 20, seed=6)[0])
    with pytest.raises(ValueError, match="context: expected less than the text's 20 bytes, got 20"):
        sample_batch(corpus.train[:20], 3, 20, seed=5)


def test_a_run_of_blanks_is_one_byte(tmp_path, corpus):
    code = b"    def f(a,    b):\n\tif a:\n          return b\n  \n" + b" " * 45 + b"f"
    encoded = b"\x11def f(a,\x11b):\n\tif a:\n\x12  return b\n  \n\x1a\x11 f"
    assert encode(code) == encoded and decode(encoded) == code.decode()
    for name in (corpus.validation_files[0], corpus.train_files[0]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(code)
    small = load_corpus(tmp_path)
    assert small.validation.numpy().tobytes() == small.train.numpy().tobytes() == encoded


# Model


def test_both_layers_are_one_model(corpus, trained):
    inputs, targets = sample_batch(corpus.train, 2, MODEL.context, seed=1)
    models = [GPT(MODEL, TimedAttention(load_attention(name))) for name in ("qkv", "torch")]
    layers = [type(model.blocks[0].attention) for model in models]
    assert layers == [SelfAttention, TorchSelfAttention]
    gradients = []
    for model in models:
        model.load_state_dict(trained.model.state_dict())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_future_is_not_seen(corpus, trained):
    inputs, _ = sample_batch(corpus.train, 1, MODEL.context, seed=1)
    other = inputs.clone()
    other[:, 30:] = 255 - other[:, 30:]
    logits, changed = trained.model(inputs), trained.model(other)
    assert torch.equal(logits[:, :30], changed[:, :30])
    assert not torch.equal(logits[:, 30:], changed[:, 30:])


def test_rotation_leaves_only_distance():
    query, key = torch.randn(2, 1, 1, 1, 16)

    def score(at, other):
        turned = [
            rotate(x, rotary_table(p, 1, 16))
            for x, p in zip((query, key), (at, other), strict=True)
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100))
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def test_writing_byte_by_byte_is_the_same_model(corpus, trained):
    tokens, _ = sample_batch(corpus.validation, 1, MODEL.context, seed=2)
    expected = trained.model(tokens)[0]
    for step in (trained.model.stepper(), trained.model.stepper(TorchCache)):
        torch.testing.assert_close(step(tokens[:, :10]), expected[9], rtol=1e-4, atol=1e-4)
        for i in range(10, MODEL.context):
            found = step(tokens[:, i : i + 1])
            torch.testing.assert_close(found, expected[i], rtol=1e-4, atol=1e-4)


def rereader(model):
    """A step as model.stepper() has it, without a cache: it reads again, for each byte, all that
    counts."""
    context, layers = model.config.context, model.config.layers
    furthest = layers * (context - 1) + 1  # each layer looks further back
    text, position = torch.empty(1, 0, dtype=torch.long), 0

    def attend(query, key, value):
        distance = torch.arange(query.size(-2))[:, None] - torch.arange(query.size(-2))
        seen = (distance >= 0) & (distance < context)
        return F.scaled_dot_product_attention(query, key, value, seen)

    @torch.no_grad()
    def step(tokens):
        nonlocal text, position
        position += tokens.size(1)
        text = torch.cat((text, tokens), dim=1)[:, -furthest:]
        table = rotary_table(position - text.size(1), text.size(1), model.config.head_dim)
        return model(text, table, [attend] * layers)[0, -1]

    return step


@pytest.mark.parametrize("cache", [QkvCache, TorchCache])
def test_a_cache_remembers_what_rereading_sees(corpus, cache):
    """A sequence is far longer than the context, so the cache has dropped its first half more than
    once."""
    torch.manual_seed(1)
    model = GPT(MODEL, load_attention("qkv"))
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.o_proj.weight)  # else attention has no say
    tokens, _ = sample_batch(corpus.validation, 1, 5 * MODEL.context, seed=2)
    cached, rereading = model.stepper(cache), rereader(model)
    first = tokens[:, : MODEL.context]
    torch.testing.assert_close(cached(first), rereading(first), rtol=1e-3, atol=1e-3)
    for token in tokens[:, MODEL.context :].split(1, dim=1):
        torch.testing.assert_close(cached(token), rereading(token), rtol=1e-3, atol=1e-3)


def test_one_layer_remembers_exactly_its_context(corpus):
    config = dataclasses.replace(MODEL, layers=1)
    model = GPT(config, load_attention("qkv"))
    torch.nn.init.normal_(model.blocks[0].attention.o_proj.weight)  # else attention has no say
    tokens, _ = sample_batch(corpus.train, 1, 2 * config.context, seed=3)
    step = model.stepper()
    step(tokens[:, :1])
    for i in range(1, tokens.size(1)):
        last = step(tokens[:, i : i + 1])
    expected = model(tokens[:, -config.context :])[0, -1]
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-4)


def test_too_many_bytes_at_once(trained):
    with pytest.raises(ValueError, match="tokens: expected 48 or fewer, got 49"):
        trained.model(torch.zeros(1, 49, dtype=torch.long))
    step = trained.model.stepper()
    step(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="tokens: expected 1 after the first call, got 2"):
        step(torch.zeros(1, 2, dtype=torch.long))


def test_text_for_the_terminal():
    assert decode("a\n\té".encode() + b"\x1b[2J\xff\0") == "a\n\té�[2J��"


def test_generation_repeats_by_seed(trained):
    def write(temperature, seed):
        return list(generate(trained.model, b"def ", 60, temperature, seed))

    assert write(0.8, 1) == write(0.8, 1) != write(0.8, 2)
    assert write(0, 1) == write(0, 2)
    with pytest.raises(ValueError, match="prompt: expected at least one byte"):
        list(generate(trained.model, b"", 1, 1.0, 0))
    with pytest.raises(ValueError, match="temperature: expected 0 or more, got nan"):
        list(generate(trained.model, b"a", 1, math.nan, 0))


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (ModelConfig, "layers", 0),
        (ModelConfig, "head_dim", 15),
        (ModelConfig, "dropout", 1.0),
        (ModelConfig, "dropout", math.nan),
        (TrainConfig, "steps", 0),
        (TrainConfig, "batch", -1),
        (TrainConfig, "learning_rate", math.nan),
        (TrainConfig, "weight_decay", -0.1),
    ],
)
def test_bad_settings_are_named(config, field, value):
    with pytest.raises(ValueError, match=f"{field}: expected .*, got {value}"):
        config(**{field: value})


# Training


def test_training_learns(corpus, trained):
    untrained = Trainer(MODEL, TRAIN, corpus, load_attention("qkv"))
    assert trained.validation_loss() < untrained.validation_loss() - 1.0


def assert_same_state(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same_state(a[key], b[key])
    else:
        assert a == b


def test_an_interrupted_training_resumes_exactly(tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    flags = [*FLAGS, "--dropout", "0.1", "--steps", "7"]  # dropout: what it draws must resume, too
    assert train_gpt.main([*flags, "--checkpoint", str(whole)]) == 0

    step = Trainer.step

    def step_with_ctrl_c(trainer):
        if trainer.step_number == 2:
            signal.raise_signal(signal.SIGINT)  # in the middle: the step must still be finished
        return step(trainer)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "step", step_with_ctrl_c)
    assert train_gpt.main([*flags, "--checkpoint", str(parts)]) == 0
    assert signal.getsignal(signal.SIGINT) == handler
    assert torch.load(parts)["step"] == 3
    monkeypatch.undo()
    torch.rand(5)  # random numbers of others change nothing
    assert train_gpt.main(["--resume", "--checkpoint", str(parts)]) == 0
    assert torch.load(whole)["step"] == 7
    assert_same_state(torch.load(whole), torch.load(parts))


def test_dropout_is_for_training_alone(corpus):
    """At every step that trains, and nowhere else, attention is asked to drop weights."""
    asked = []

    def attention(query, key, value, dropout_p, is_causal):
        asked.append(dropout_p)
        return F.scaled_dot_product_attention(query, key, value, None, dropout_p, is_causal)

    config = dataclasses.replace(MODEL, dropout=0.25)
    trainer = Trainer(config, TRAIN, corpus, attention)
    trainer.step()
    assert asked == [0.25] * MODEL.layers
    trainer.validation_loss(batches=1)
    trainer.validation_gradient()
    assert asked[MODEL.layers :] == [0.0] * 2 * MODEL.layers


def test_a_loaded_model_drops_nothing(tmp_path, corpus):
    trainer = Trainer(dataclasses.replace(MODEL, dropout=0.5), TRAIN, corpus, load_attention("qkv"))
    for _ in range(2):
        trainer.step()
    trainer.save(tmp_path / "gpt.pt")
    model = load_model(tmp_path / "gpt.pt", load_attention("qkv"))
    inputs, _ = sample_batch(corpus.train, 1, MODEL.context, seed=1)
    assert torch.equal(model(inputs), trainer.model(inputs))
    assert torch.equal(model(inputs), model(inputs))


def test_a_checkpoint_of_another_format_is_refused(tmp_path, capsys, trained):
    path = tmp_path / "gpt.pt"
    trained.save(path)
    state = torch.load(path)
    del state["format"]  # as they were when every blank was a byte of its own
    torch.save(state, path)
    for mode in (["--resume"], ["--generate", "def "]):
        with pytest.raises(SystemExit):
            train_gpt.main([*mode, "--checkpoint", str(path)])
        message = "gpt.pt: expected a checkpoint of format 3, got format 1, of another model"
        assert message in capsys.readouterr().err


# The comparison


def tiny_comparison(corpus):
    return compare.compare(MODEL, TRAIN, corpus)


def test_both_attentions_train_alike(corpus):
    comparison = tiny_comparison(corpus)
    assert compare.disagreements(comparison) == []
    assert [check.step for check in comparison.same_weights] == [0, 1, 2, 3, 4, 5, 6]
    for run in comparison.runs.values():
        assert len(run.loss) == len(run.step_seconds) == TRAIN.steps
        for whole, *parts in zip(
            run.step_seconds, run.forward_seconds, run.backward_seconds, strict=True
        ):
            assert 0 < min(parts) and sum(parts) < whole


def test_a_comparison_ends_at_its_deadline(corpus, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(compare, "perf_counter", lambda: next(clock))
    comparison = compare.compare(MODEL, TRAIN, corpus, deadline=7)
    # 5 readings a step: before and after each model's, and then one for the deadline
    assert [run.trainer.step_number for run in comparison.runs.values()] == [2, 2]
    assert compare.disagreements(comparison) == []


def wrong_scale(query, key, value, **options):
    return F.scaled_dot_product_attention(query * 1.001, key, value, **options)


def wrong_gradient(query, key, value, **options):
    value.register_hook(lambda gradient: gradient * 1.001)
    return F.scaled_dot_product_attention(query, key, value, **options)


@pytest.mark.parametrize("wrong", [wrong_scale, wrong_gradient])
def test_a_slightly_wrong_attention_is_found_out(corpus, monkeypatch, wrong):
    attentions = {"torch": F.scaled_dot_product_attention, "qkv": wrong}
    monkeypatch.setattr(compare, "load_attention", attentions.__getitem__)
    monkeypatch.setattr(timer.TimedAttention, "_time_backward", lambda *_: None)
    found = compare.disagreements(compare.compare(MODEL, TRAIN, corpus))
    assert any("on the same weights" in line for line in found)


def test_losses_that_drift_apart_are_found_out(corpus):
    comparison = tiny_comparison(corpus)
    ours = comparison.runs["qkv"].loss
    ours[2] += 1e-4
    assert [line[:7] for line in compare.disagreements(comparison)] == ["step 2:"]
    ours[2] = math.nan
    assert [line[:7] for line in compare.disagreements(comparison)] == ["step 2:"]
    ours[2], ours[-1] = comparison.runs["torch"].loss[2], ours[-1] + 0.05
    assert [line[:7] for line in compare.disagreements(comparison)] == ["step 5:", "last te"]


def test_the_timer_measures_each_call_once(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(timer, "perf_counter", lambda: next(ticks))
    attention = TimedAttention(load_attention("qkv"))
    inputs = [(torch.randn(1, 2, 5, 8, requires_grad=True) * 1.0) for _ in range(3)]
    output = attention(*inputs, is_causal=True)
    assert (attention.forward_seconds, attention.backward_seconds) == (1, 0)
    output.sum().backward()
    assert (attention.forward_seconds, attention.backward_seconds) == (1, 1)
    with torch.no_grad():
        attention(*inputs)
    assert (attention.forward_seconds, attention.backward_seconds) == (2, 1)


def test_the_timer_refuses_what_it_cannot_measure():
    inputs = [(torch.randn(1, 2, 5, 8, requires_grad=True) * 1.0) for _ in range(3)]
    with pytest.raises(RuntimeError, match="expected one autograd node"):
        TimedAttention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v)(*inputs)


def test_attention_maps_are_the_weights_in_use(trained):
    line = b"\nself.name = name"
    maps = attention_maps(trained.model, line)
    assert maps.shape == (2, 2, len(line), len(line))
    assert maps.triu(1).count_nonzero() == 0
    block = trained.model.blocks[0]
    x = block.attention_norm(trained.model.embedding(torch.tensor([list(line)])))
    query, key, value = block.attention.heads_of(x, trained.model.rotary[: len(line)])
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(maps[0] @ value[0], expected[0], rtol=1e-4, atol=1e-5)


def test_the_line_to_draw(corpus):
    line, code = telling_line(corpus)
    assert re.fullmatch(rb"self\.(\w+) = \1", line)
    assert code.endswith(b"\n\x12" + line) and code in corpus.validation.numpy().tobytes()
    mentions = Mentions.of(b"\nself.name = name")
    assert mentions == Mentions(first=6, second=13, length=4)
    maps = torch.zeros(1, 1, 17, 17)
    maps[0, 0, 13:15, 6] = 1.0  # half of the second mention looks at the first
    maps[0, 0, 15:, 0] = 1.0
    assert mentions.recall(maps).item() == 0.5


def test_steps_are_timed_in_turn(corpus, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(variants, "perf_counter", lambda: next(clock))
    asked = []

    def load(name):
        def attention(*inputs, dropout_p, is_causal):
            asked.append(name)
            return load_attention(name)(*inputs, dropout_p=dropout_p, is_causal=is_causal)

        return attention

    monkeypatch.setattr(variants, "load_attention", load)
    model = dataclasses.replace(MODEL, layers=1)
    # 4 readings a turn, and from the third on one more, for the end: at 13 and at 18
    times = variants.time_steps(model, TRAIN, corpus, seconds=16)
    assert times == {"qkv": [1] * 4, "torch": [1] * 4}
    assert asked == "qkv torch qkv torch torch qkv qkv torch torch qkv".split()


def test_variants_differ_in_what_they_say(corpus, monkeypatch):
    monkeypatch.setattr(variants, "time_steps", lambda *setting: {"qkv": setting})
    config = TrainConfig(batch=4)
    dropout, long = variants.time_variants(ModelConfig(context=1024), config, corpus, 10.0)
    assert dropout.name == "dropout 0.1" and long.name == "context 2048"
    expected = ModelConfig(context=1024, dropout=0.1), config, corpus, 5.0
    assert dropout.step_seconds["qkv"] == expected
    expected = ModelConfig(context=2048), TrainConfig(batch=2), corpus, 5.0  # as many bytes a step
    assert long.step_seconds["qkv"] == expected
    assert Variant("", {"qkv": [1.0, 5.0, 2.0]}).medians() == {"qkv": 2.0}


@pytest.mark.long
def test_a_comparison_from_the_command_line(tmp_path, capsys):
    arguments = [*FLAGS, "--compare", "--seconds", "1", "--out", str(tmp_path / "new")]
    assert train_gpt.main(arguments) == 0
    printed = capsys.readouterr().out
    assert re.search(r"attention +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d\n", printed)
    assert "DISAGREEMENT" not in printed
    beginnings = "A training step", "With dropout 0.1 it", "With context 2048 it"
    for beginning, line in zip(beginnings, printed.splitlines()[-3:], strict=True):
        assert line.startswith(beginning + " took ")
        assert re.search(r"\d+ ms on qkv and \d+ ms on torch: \d+\.\d\d times as fast\.$", line)
    for name in ("step, dropout 0.1", "step, context 2048"):
        assert re.search(name + r" +\d+\.\d\d +\d+\.\d\d +\d+\.\d\d\n", printed)
    checkpoint = tmp_path / "new" / "gpt.pt"
    assert f"--generate 'class Queue:' --checkpoint {checkpoint}\n" in printed
    assert load_model(checkpoint, load_attention("qkv")).config == MODEL
    for name in ("losses", "step_times", "attention_map"):
        picture = tmp_path / "new" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


# The command line


def test_the_same_text_from_either_cache(trained):
    for temperature in (0, 0.8):
        options = trained.model, b"def ", 3 * MODEL.context, temperature, 1
        assert list(generate(*options, QkvCache)) == list(generate(*options, TorchCache))


def test_an_int8_cache_writes_on(trained):
    """Beyond `context`, where it forgets; the likeliest bytes are those of a float cache as long as
    rounding does not decide between two, and at least the first ones are."""
    options = trained.model, b"def ", 3 * MODEL.context, 0, 1
    plain, int8 = (list(generate(*options, cache)) for cache in (QkvCache, Int8Cache))
    assert len(int8) == 3 * MODEL.context and int8[0] == plain[0]


def test_int8_caches_change_logits_little(trained):
    """After a prompt, and byte by byte, while positions are forgotten."""
    text = list(b"def __init__(self):\n    self.")
    plain, int8 = trained.model.stepper(QkvCache), trained.model.stepper(Int8Cache)
    for tokens in ([text], *([[byte]] for byte in 4 * text)):
        truth, found = plain(torch.tensor(tokens)), int8(torch.tensor(tokens))
        assert not torch.equal(truth, found)
        assert (truth - found).square().mean() < 1e-3 * truth.var()


def test_timed_counts_tokens_a_second(monkeypatch):
    clock = iter([10, 12])
    monkeypatch.setattr("gpt.generate.perf_counter", lambda: next(clock))
    assert timed(iter(b"abcdef")) == (b"abcdef", 3.0)


def test_writing_from_a_checkpoint(tmp_path, capsys, trained):
    trained.save(tmp_path / "gpt.pt")
    arguments = ["--generate", "def f(", "--length", "30", "--checkpoint", str(tmp_path / "gpt.pt")]
    found = {}
    for attention in ("qkv", "torch"):
        assert train_gpt.main([*arguments, "--temperature", "0", "--attention", attention]) == 0
        found[attention] = capsys.readouterr()
    texts = [printed.out for printed in found.values()]
    assert texts[0] == texts[1] and texts[0].startswith("def f(") and len(texts[0]) > 30
    assert train_gpt.main([*arguments, "--int8-cache"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("def f(") and "attention, with an int8 cache" in printed.err
    for attention, printed in found.items():
        line = rf"^\d+ tokens/s on {attention}'s attention, with a cache$"
        assert re.search(line, printed.err, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--checkpoint: .*none.pt does not exist; train first"),
        (["--generate", "a"], "--checkpoint: .*none.pt does not exist; train first"),
        (
            ["--resume", "--layers", "3", "--seed", "1"],
            "--layers, --seed: .*none.pt brings its own",
        ),
        (["--generate", "a", "--steps", "3"], "--steps: .*none.pt brings its own"),
        (["--seconds", "nan"], "--seconds: expected more than 0, got nan"),
        (["--threads", "0"], "--threads: expected more than 0, got 0"),
        (["--layers", "0"], "layers: expected 1 or more, got 0"),
        (["--learning-rate", "x"], "--learning-rate: invalid float value: 'x'"),
        (["--attention", "flash"], "--attention: invalid choice: 'flash'"),
        (["--compare", "--dropout", "0.2"], "--dropout: --compare trains without, and then times"),
        (["--int8-cache"], "--int8-cache: expected with --generate, on qkv's attention"),
        (
            ["--int8-cache", "--generate", "a", "--attention", "torch"],
            "--int8-cache: expected with --generate, on qkv's attention",
        ),
        (["--compare", "--out", __file__], "--out: .*test_train_gpt.py is no folder"),
        (["--resume", "--compare"], "not allowed with argument --resume"),
    ],
)
def test_bad_arguments(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        train_gpt.main([*arguments, "--checkpoint", str(tmp_path / "none.pt")])
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_checkpoint_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "gpt.pt").write_bytes(b"precious")
    with pytest.raises(SystemExit):
        train_gpt.main(["--checkpoint", str(tmp_path / "gpt.pt")])
    assert "gpt.pt exists: --resume goes on" in capsys.readouterr().err
    assert (tmp_path / "gpt.pt").read_bytes() == b"precious"
