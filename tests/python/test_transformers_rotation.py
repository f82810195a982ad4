"""register(kernels=True): models of transformers rotate query and key by qkv.rotate."""

import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

transformers = pytest.importorskip("transformers")

from decoder_models import check_training, counting, model_of  # noqa: E402

import qkv.integrations.transformers as integration  # noqa: E402

integration.register()

from qkv.integrations.transformers import _rotation  # noqa: E402

ROTATED = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi", "olmo2"]
# Of neighbours; of tables with half as many numbers; with other arguments.
OTHERS = ["cohere", "gpt_oss", "glm4"]


@pytest.fixture
def rotations(monkeypatch):
    """The dtypes of the calls of qkv.rotate that models make."""
    with counting(monkeypatch, _rotation, "rotate", lambda x: x.dtype) as calls:
        yield calls


@pytest.mark.parametrize("family", ROTATED + OTHERS)
def test_results_and_gradients(family, rotations):
    assert check_training(model_of(family), rotations) == (2 if family in ROTATED else 0)


def test_cached_steps_and_half_precision(rotations):
    model = model_of("llama")
    prompt = torch.randint(1, 50, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(prompt, **options)
    model.set_attn_implementation("qkv")
    rotations.clear()
    assert torch.equal(model.generate(prompt, **options), expected)
    assert len(rotations) == 2 * 6
    model.bfloat16()(prompt)
    assert rotations[-1] == torch.bfloat16


def test_a_model_that_is_given_the_same_attention_once_more(rotations):
    integration.unregister()
    integration.register()
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    integration.register(kernels=True)
    model.set_attn_implementation("qkv")
    rotations.clear()  # of trials
    model(torch.ones(1, 5, dtype=torch.int64))
    assert len(rotations) == 2


def test_compiled(rotations):
    """Compilers fuse the model's own function."""
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    ids = torch.randint(50, (2, 9))
    expected = model(ids).logits
    rotations.clear()
    assert_close(torch.compile(model, backend="aot_eager")(ids).logits, expected)
    assert not rotations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_loaded(dtype, rotations, tmp_path):
    """It is made on meta, where no numbers can be asked for, and with its dtype as the default."""
    model_of("llama").save_pretrained(tmp_path)
    options = {"dtype": dtype, "attn_implementation": "qkv"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert [name for _, name in _rotation.replaced] == ["apply_rotary_pos_emb", "forward"]
    rotations.clear()
    model(torch.randint(50, (2, 9)))
    assert rotations == [dtype] * 2


def test_a_function_with_other_arguments_is_not_replaced():
    assert _rotation._trial(lambda q, k, position_ids: (q, k)) is None


def test_undone(rotations):
    module = sys.modules[type(model_of("llama")).__module__]
    function = module.apply_rotary_pos_emb
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    assert module.apply_rotary_pos_emb is not function
    model.set_attn_implementation("eager")
    integration.unregister()
    assert module.apply_rotary_pos_emb is function
    with pytest.raises(ValueError, match="qkv"):
        model_of("llama").set_attn_implementation("qkv")


class TestCalls:
    """A call that is not what the trial was about is the function's own."""

    @pytest.fixture
    def functions(self, rotations):
        model_of("llama").set_attn_implementation("qkv")
        module = sys.modules["transformers.models.llama.modeling_llama"]
        rotations.clear()
        yield (
            module.apply_rotary_pos_emb,
            _rotation.replaced[module, "apply_rotary_pos_emb"],
            rotations,
        )

    def rows(self, dtype=torch.float32, width=8):
        torch.manual_seed(0)
        angles = torch.randn(2, 5, width // 2)
        tables = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))
        return torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, 2, 5, 8, dtype=dtype), *tables

    def test_taken(self, functions):
        ours, theirs, calls = functions
        q, k, cos, sin = self.rows()
        for dim, rows in ((1, (q, k)), (2, (q.transpose(1, 2), k.transpose(1, 2)))):
            assert_close(ours(*rows, cos, sin, dim), theirs(*rows, cos, sin, dim))
        assert len(calls) == 2
        for length in (5, 3):  # other tables than in the call before, which are there still
            tables = cos[:, :length], sin[:, :length]
            found = ours(q[:, :, :length], k[:, :, :length], *tables)
            assert_close(found, theirs(q[:, :, :length], k[:, :, :length], *tables))

    def test_tables_whose_halves_differ(self, functions):
        ours, theirs, calls = functions
        q, k, cos, sin = self.rows()
        ours(q, k, cos, sin)
        calls.clear()
        cos[0, 2, 1] += 1  # in place: the tables were looked at in the call before
        assert torch.equal(ours(q, k, cos, sin)[0], theirs(q, k, cos, sin)[0])
        assert not calls

    def test_tables_with_gradients(self, functions):
        """Which each half has its own part of."""
        ours, theirs, calls = functions
        q, k, *tables = self.rows()
        tables = [x.requires_grad_() for x in tables]
        found, expected = (
            torch.autograd.grad(f(q, k, *tables)[0].square().sum(), tables) for f in (ours, theirs)
        )
        assert_close(found, expected)
        assert not calls

    def test_what_is_broadcast(self, functions):
        """Tables over places, queries and keys over batch items."""
        ours, theirs, calls = functions
        q, k, cos, sin = self.rows()
        for call in (
            (q, k, cos[:, :1], sin[:, :1]), (q[:1], k[:1], cos, sin), (q, k[:1], cos, sin),
        ):  # fmt: skip
            assert_close(ours(*call), theirs(*call), rtol=0, atol=0)
        assert not calls
        assert_close(ours(q, k, cos[:1], sin[:1]), theirs(q, k, cos[:1], sin[:1]))
        assert calls

    def test_tables_of_another_dtype(self, functions):
        ours, theirs, calls = functions
        q, k, _, _ = self.rows(torch.bfloat16)
        _, _, cos, sin = self.rows()
        found = ours(q, k, cos, sin)
        assert found[0].dtype == torch.float32 and not calls
        assert torch.equal(found[0], theirs(q, k, cos, sin)[0])

    def test_vmap(self, functions):
        ours, theirs, calls = functions
        q, k, cos, sin = self.rows()
        cos, sin = cos[:1], sin[:1]
        found = torch.vmap(ours, in_dims=(0, 0, None, None))(q[:, None], k[:, None], cos, sin)
        assert_close(found[0][:, 0], theirs(q, k, cos, sin)[0])
        assert not calls

    def test_no_key(self, rotations):
        """As Qwen 4's indexer calls it, for one result."""
        name = "transformers.models.qwen4_exp.modeling_qwen4_exp"
        module = pytest.importorskip(name)
        theirs = module.apply_rotary_pos_emb
        _rotation.replace_rotation(name)
        q, k, cos, sin = self.rows()
        found = module.apply_rotary_pos_emb(q, cos=cos, sin=sin)
        assert_close(found, theirs(q, cos=cos, sin=sin))
        rotations.clear()  # of the trial
        assert_close(module.apply_rotary_pos_emb(q, k, cos, sin)[0], found)
        assert len(rotations) == 1

    def test_recorded(self, functions):
        """Where the numbers of tables cannot be asked for."""
        ours, theirs, calls = functions
        q, k, cos, sin = self.rows()
        found = make_fx(lambda *rows: ours(*rows))(q, k, cos, sin)(q, k, cos, sin)
        assert_close(found, theirs(q, k, cos, sin))
        halves_differ = cos + torch.randn_like(cos)
        traced = torch.jit.trace(ours, (q, k, cos, sin), check_trace=False)
        assert_close(traced(q, k, halves_differ, sin), theirs(q, k, halves_differ, sin))
        assert not calls
