// qkv::nn::SelfAttention and CrossAttention against the same layers of torch's operators, and their
// caches against one call.
#include <ATen/record_function.h>
#include <torch/nn/modules/container/any.h>
#include <torch/serialize.h>

#include <algorithm>
#include <sstream>

#include "common.h"
#include "qkv/nn.h"

namespace qkv::test::nn_self_attention_tests {
namespace {

using nn::SelfAttentionOptions;

constexpr double kTolerance = 1e-10;
constexpr int64_t B = 2, H = 4, Hkv = 2, L = 7, E = 12, D = 8;

struct Case {
  std::string name;
  SelfAttentionOptions options = SelfAttentionOptions(E, H).num_kv_heads(Hkv).head_dim(D);
  AttentionOptions scores = AttentionOptions().is_causal(true);
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

std::vector<Case> cases() {
  const auto options = [] { return Case().options; };
  const auto frequencies = nn::rotary_frequencies(D, 100.0);
  return {
      {"plain"},
      {"rotation", options().frequencies(frequencies)},
      {"partial_pairs", options().frequencies(nn::rotary_frequencies(4)).interleaved(true)},
      {"norm", options().qk_norm(true)},
      {"all",
       options()
           .frequencies(frequencies)
           .rotary_scale(1.2)
           .qk_norm(true)
           .norm_offset(1)
           .sinks(true)
           .gate(true)
           .bias(true),
       Case().scores.window_size({{3, 0}}).softcap(2).scale(0.4)},
  };
}

nn::SelfAttention make(const Case& c) {
  torch::manual_seed(0);
  nn::SelfAttention layer(c.options, c.scores);
  layer->to(torch::kDouble);
  torch::NoGradGuard guard;
  for (auto& parameter : layer->parameters()) parameter.normal_(0, 0.4);
  return layer;
}

// x [B, H, L, D] with the first pairs turned by angles [L, R / 2].
at::Tensor turned(const at::Tensor& x, const at::Tensor& angles, const SelfAttentionOptions& o) {
  const int64_t R = 2 * angles.size(-1);
  at::Tensor pairs = x.slice(-1, 0, R);
  pairs = o.interleaved() ? pairs.unflatten(-1, {-1, 2}) : pairs.unflatten(-1, {2, -1}).mT();
  const at::Tensor cos = angles.cos() * o.rotary_scale(), sin = angles.sin() * o.rotary_scale();
  const at::Tensor a = pairs.select(-1, 0), b = pairs.select(-1, 1);
  pairs = at::stack({a * cos - b * sin, b * cos + a * sin}, o.interleaved() ? -1 : -2);
  return at::cat({pairs.flatten(-2), x.slice(-1, R)}, -1);
}

at::Tensor formula(nn::SelfAttention layer, const at::Tensor& x, const at::Tensor& mask) {
  const SelfAttentionOptions& o = layer->options;
  const at::Tensor all = layer->qkv_proj->forward(x).unflatten(-1, {-1, D}).transpose(1, 2);
  std::vector<at::Tensor> heads = {all.slice(1, 0, H), all.slice(1, H, H + Hkv)};
  for (int i = 0; i < 2; ++i) {
    at::Tensor& y = heads[i];
    if (o.qk_norm())
      y = y * (y.square().mean(-1, true) + o.norm_eps()).rsqrt() *
          ((i ? layer->k_norm : layer->q_norm) + o.norm_offset());
    if (o.frequencies()) y = turned(y, at::arange(L).unsqueeze(-1) * *o.frequencies(), o);
  }
  AttentionOptions call = layer->scores;
  call.enable_gqa(true).attn_mask(mask.defined() ? std::optional(mask) : std::nullopt);
  if (o.sinks()) call.sinks(layer->sinks);
  at::Tensor output =
      attention(heads[0], heads[1], all.slice(1, H + Hkv, H + 2 * Hkv).contiguous(), call);
  if (o.gate()) output = output * all.slice(1, H + 2 * Hkv).sigmoid();
  return layer->o_proj->forward(output.transpose(1, 2).flatten(2));
}

// Appends the names of the operators that this thread calls to `names`, as long as it lives.
class OperatorsCalled {
 public:
  explicit OperatorsCalled(std::vector<std::string>& names)
      : callback_(
            at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& f) {
                                         names_->push_back(f.name());
                                         return std::unique_ptr<at::ObserverContext>();
                                       }).scopes({at::RecordScope::FUNCTION}))) {
    names_ = &names;
  }
  ~OperatorsCalled() { at::removeCallback(callback_); }

 private:
  static inline thread_local std::vector<std::string>* names_;  // a callback is a plain function
  at::CallbackHandle callback_;
};

struct Decoder : testing::TestWithParam<Case> {
  nn::SelfAttention layer = make(GetParam());
  at::Tensor x = randn({B, L, E});
};

TEST_P(Decoder, ComputesItsFormulaWithGradients) {
  for (const at::Tensor& mask : {at::Tensor(), randn({H, L, L})}) {
    std::vector<at::Tensor> leaves = layer->parameters(), results[2];
    leaves.push_back(x);
    for (int i = 0; i < 2; ++i) {
      const at::Tensor output = i ? formula(layer, x, mask) : layer(x, mask);
      results[i] = torch::autograd::grad({output.sin().sum()}, leaves);
      results[i].push_back(output);
    }
    expect_close(results[0], results[1], kTolerance);
  }
}

TEST_P(Decoder, ACacheInPartsIsOneCall) {
  torch::NoGradGuard guard;
  nn::KvCache cache = layer->new_cache(B, L);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& part : x.split_with_sizes({4, 2, 1}, 1))
    parts.push_back(layer(part, at::Tensor(), &cache));
  expect_close(at::cat(parts, 1), layer(x), kTolerance);
  EXPECT_TRUE(at::equal(cache.lengths, at::full({B}, L)));
}

// No tokens at all make no tables, and the tables of another dtype are made anew.
TEST_P(Decoder, ACacheOfAnotherDtypeBeginsWithNothing) {
  torch::NoGradGuard guard;
  nn::KvCache cache = layer->new_cache(B, L);
  EXPECT_EQ(layer(x.slice(1, 0, 0), at::Tensor(), &cache).size(1), 0);
  for (int64_t i = 0; i < 4; ++i) layer(x.slice(1, i, i + 1), at::Tensor(), &cache);
  layer->to(torch::kFloat);
  cache.keys = cache.keys.to(at::kFloat), cache.values = cache.values.to(at::kFloat);
  const at::Tensor single = x.to(at::kFloat);
  expect_close(layer(single.slice(1, 4, 5), at::Tensor(), &cache), layer(single).slice(1, 4, 5),
               1e-5);
}

// Rows of other lengths, behind a boolean mask, are the rows by themselves; and only where a norm
// comes first is the rotation a call of its own.
TEST_P(Decoder, ACacheOfRowsOfOtherLengths) {
  torch::NoGradGuard guard;
  const std::vector<int64_t> lengths = {1, 4};
  const at::Tensor mask = at::arange(L) != 2;
  nn::KvCache cache = layer->new_cache(B, L);
  layer(x.slice(1, 0, 4), at::Tensor(), &cache);
  cache.lengths = at::tensor(lengths);
  std::vector<std::string> called;
  at::Tensor output;
  {
    const OperatorsCalled record(called);
    output = layer(x.slice(1, 4), mask.slice(0, 0, L), &cache);
  }
  for (int64_t b = 0; b < B; ++b) {
    const at::Tensor row =
        at::cat({x.narrow(0, b, 1).slice(1, 0, lengths[b]), x.narrow(0, b, 1).slice(1, 4)}, 1);
    expect_close(output.narrow(0, b, 1), layer(row, mask.slice(0, 0, row.size(1))).slice(1, -3),
                 kTolerance);
  }
  const auto calls = [&](const char* name) {
    return std::count(called.begin(), called.end(), name);
  };
  EXPECT_EQ(calls("qkv::attention_with_kvcache"), 1);
  EXPECT_EQ(calls("qkv::rotate"), GetParam().options.qk_norm());
}

// Its tables follow from options, which are on the CPU.
TEST_P(Decoder, SaysItsShapeOnMeta) {
  for (at::Tensor* parameter :
       {&layer->qkv_proj->weight, &layer->qkv_proj->bias, &layer->o_proj->weight,
        &layer->o_proj->bias, &layer->q_norm, &layer->k_norm, &layer->sinks})
    if (parameter->defined()) *parameter = parameter->to(at::kMeta);
  const at::Tensor output = layer(x.to(at::kMeta));
  EXPECT_TRUE(output.is_meta());
  EXPECT_EQ(output.sizes(), x.sizes());
}

TEST_P(Decoder, ArchivesAndClones) {
  std::stringstream archive;
  torch::save(layer, archive);
  nn::SelfAttention loaded(GetParam().options, GetParam().scores);
  loaded->to(torch::kDouble);
  torch::load(loaded, archive);
  EXPECT_TRUE(at::equal(loaded(x), layer(x)));
  nn::SelfAttention clone(std::dynamic_pointer_cast<nn::SelfAttentionImpl>(layer->clone()));
  EXPECT_TRUE(at::equal(clone(x), layer(x)));
  torch::nn::AnyModule any(layer);
  EXPECT_TRUE(at::equal(any.forward(x), layer(x)));
}

INSTANTIATE_TEST_SUITE_P(Nn, Decoder, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(DecoderCalls, DropoutIsForTraining) {
  Case c;
  c.options.dropout(0.5);
  nn::SelfAttention layer = make(c), plain = make(Case());
  const at::Tensor x = randn({B, L, E});
  EXPECT_FALSE(at::allclose(layer(x), plain(x)));
  nn::KvCache cache = layer->new_cache(B, L);
  EXPECT_EQ(message_of([&] { layer(x, at::Tensor(), &cache); }),
            "SelfAttention: dropout is 0.5, but 0 is expected with a cache, or a layer in eval "
            "mode");
  layer->eval();
  EXPECT_TRUE(at::equal(layer(x), plain(x)));
}

TEST(DecoderCalls, ErrorsNameTheArgument) {
  const auto made = [](SelfAttentionOptions options) {
    return message_of<c10::ValueError>([&] { nn::SelfAttention{options}; });
  };
  EXPECT_EQ(made(SelfAttentionOptions(0, 4)),
            "SelfAttention: embed_dim is 0 and num_heads 4, but 1 or more is expected");
  EXPECT_EQ(made(SelfAttentionOptions(12, 4).num_kv_heads(3)),
            "SelfAttention: num_kv_heads is 3, but a divisor of num_heads, 4, is expected");
  EXPECT_EQ(made(SelfAttentionOptions(12, 5)),
            "SelfAttention: embed_dim is 12, but a multiple of num_heads, 5, is expected without "
            "head_dim");
  EXPECT_EQ(made(SelfAttentionOptions(12, 4).head_dim(0)),
            "SelfAttention: head_dim is 0, but 1 or more is expected");
  EXPECT_EQ(
      made(SelfAttentionOptions(12, 4).frequencies(at::ones({2}))),
      "SelfAttention: frequencies are [2], but [R / 2] is expected, of an R up to head_dim, 3");
  EXPECT_EQ(
      made(SelfAttentionOptions(12, 4).frequencies(at::Tensor())),
      "SelfAttention: frequencies are an undefined tensor, but [R / 2] is expected, of an R up "
      "to head_dim, 3");
  EXPECT_EQ(message_of<c10::ValueError>([] { nn::rotary_frequencies(5); }),
            "rotary_frequencies: R is 5, but an even number from 2 on is expected");
  EXPECT_EQ(message_of<c10::ValueError>([] { nn::rotary_frequencies(4, 0); }),
            "rotary_frequencies: base is 0, but a positive number is expected");
  nn::SelfAttention layer = make(Case());
  EXPECT_EQ(message_of([&] { layer(randn({B, L, E + 1})); }),
            "SelfAttention: x is [2, 7, 13], but [B, L, 12] is expected");
  EXPECT_EQ(message_of([&] { layer(at::Tensor()); }),
            "SelfAttention: x is an undefined tensor, but [B, L, 12] is expected");
  nn::SelfAttention sloping(layer->options, AttentionOptions().alibi_slopes(at::ones({4})));
  sloping->eval();
  nn::KvCache cache = sloping->new_cache(B, L);
  EXPECT_EQ(message_of([&] { sloping(at::ones({B, 1, E}), at::Tensor(), &cache); }),
            "SelfAttention: scores has bias, spans, alibi_slopes or score_program, but none of "
            "these is expected with a cache");
  for (nn::KvCache* given : {static_cast<nn::KvCache*>(nullptr), &cache}) {
    nn::SelfAttention lone(layer->options, AttentionOptions().score_tables(at::ones({3})));
    torch::NoGradGuard guard;
    const auto refused = message_of([&] { lone(at::ones({B, 1, E}), at::Tensor(), given); });
    EXPECT_NE(refused.find("score_tables is given, but there is no score_program"),
              std::string::npos);
  }
}

TEST(DecoderCalls, AMaskIsRefusedByItsName) {
  torch::NoGradGuard guard;
  nn::SelfAttention layer = make(Case());
  nn::KvCache cache = layer->new_cache(B, 2 * L);
  const at::Tensor x = randn({B, L, E});
  layer(x, at::Tensor(), &cache);
  for (nn::KvCache* given : {static_cast<nn::KvCache*>(nullptr), &cache}) {
    const int64_t keys = given ? 2 * L : L;
    const auto refused = [&](const at::Tensor& mask) {
      return message_of([&] { layer(x, mask, given); });
    };
    EXPECT_EQ(
        refused(at::ones({keys}, at::kLong)),
        "SelfAttention: mask is Long, but Bool (true = may attend), Float or the dtype of the "
        "projected query, Double, is expected");
    EXPECT_EQ(refused(at::ones({3, 1, 1, keys})),
              c10::str("SelfAttention: mask is [3, 1, 1, ", keys,
                       "], but what broadcasts to [2, 4, 7, ", keys, "] is expected"));
  }
  EXPECT_EQ(message_of([&] { layer(x, at::ones({L, L}, at::kBool), &cache); }),
            "SelfAttention: mask is [7, 7], but a number for each of the longest row's 14 keys is "
            "expected");
  EXPECT_TRUE(at::equal(cache.lengths, at::full({B}, L)));
}

TEST(DecoderCalls, ACacheIsRefusedByItsName) {
  torch::NoGradGuard guard;
  const auto turning = Case().options.frequencies(nn::rotary_frequencies(D));
  nn::SelfAttention layer = make({"rotation", turning});
  const auto refused = [&](nn::KvCache cache) {
    return message_of([&] { layer(randn({B, L, E}), at::Tensor(), &cache); });
  };
  EXPECT_EQ(refused({}),
            "SelfAttention: cache.keys is an undefined tensor, but what new_cache makes is "
            "expected");
  nn::KvCache cache = layer->new_cache(B, L);
  cache.lengths = at::zeros({B + 1}, at::kLong);
  EXPECT_EQ(refused(cache),
            "SelfAttention: cache.lengths is [3], but [2] is expected, a number for each row of x");
  cache.lengths = at::zeros({B}, at::kLong);
  cache.block_table = at::zeros({B}, at::kInt);
  EXPECT_NE(refused(cache).find("block_table has the shape [2]"), std::string::npos);
}

constexpr int64_t S = 5, C = 10;

struct Reader : testing::TestWithParam<bool> {
  SelfAttentionOptions options = SelfAttentionOptions(E, H).num_kv_heads(Hkv).head_dim(D);
  at::Tensor x = randn({B, L, E}), context = randn({B, S, C});

  nn::CrossAttention make() {
    torch::manual_seed(0);
    if (GetParam()) options.qk_norm(true).norm_offset(1).sinks(true).gate(true).bias(true);
    nn::CrossAttention layer(options, C, AttentionOptions().softcap(GetParam() ? 2 : 0));
    layer->to(torch::kDouble);
    torch::NoGradGuard guard;
    for (auto& parameter : layer->parameters()) parameter.normal_(0, 0.4);
    return layer;
  }

  at::Tensor formula(nn::CrossAttention layer, const at::Tensor& mask) const {
    const auto normed = [&](const at::Tensor& y, const at::Tensor& weight) {
      if (!weight.defined()) return y;
      return y * (y.square().mean(-1, true) + options.norm_eps()).rsqrt() * (weight + 1);
    };
    const auto heads = [](const at::Tensor& y) { return y.unflatten(-1, {-1, D}).transpose(1, 2); };
    const at::Tensor query = heads(layer->q_proj(x)), keys = heads(layer->kv_proj(context));
    AttentionOptions call = layer->scores;
    call.enable_gqa(true).attn_mask(mask.defined() ? std::optional(mask) : std::nullopt);
    if (layer->sinks.defined()) call.sinks(layer->sinks);
    at::Tensor output = attention(normed(query.slice(1, 0, H), layer->q_norm),
                                  normed(keys.slice(1, 0, Hkv), layer->k_norm),
                                  keys.slice(1, Hkv).contiguous(), call);
    if (options.gate()) output = output * query.slice(1, H).sigmoid();
    return layer->o_proj(output.transpose(1, 2).flatten(2));
  }
};

TEST_P(Reader, ComputesItsFormulaWithGradients) {
  nn::CrossAttention layer = make();
  for (const at::Tensor& mask : {at::Tensor(), randn({H, L, S})}) {
    std::vector<at::Tensor> leaves = layer->parameters(), results[2];
    leaves.insert(leaves.end(), {x, context});
    for (int i = 0; i < 2; ++i) {
      const at::Tensor output = i ? formula(layer, mask) : layer(x, context, mask);
      results[i] = torch::autograd::grad({output.sin().sum()}, leaves);
      results[i].push_back(output);
    }
    expect_close(results[0], results[1], kTolerance);
  }
}

TEST_P(Reader, AContextProjectedOnce) {
  nn::CrossAttention layer = make();
  const nn::KvCache cache = layer->new_cache(context);
  torch::NoGradGuard guard;
  std::vector<at::Tensor> steps;
  for (const at::Tensor& step : x.split(1, 1))
    steps.push_back(layer(step, at::Tensor(), at::Tensor(), &cache));
  expect_close(at::cat(steps, 1), layer(x, context), kTolerance);
  EXPECT_TRUE(at::equal(cache.lengths, at::full({B}, S)));
}

TEST_P(Reader, Clones) {
  nn::CrossAttention layer = make();
  nn::CrossAttention clone(std::dynamic_pointer_cast<nn::CrossAttentionImpl>(layer->clone()));
  EXPECT_TRUE(at::equal(clone(x, context), layer(x, context)));
  torch::nn::AnyModule any(layer);
  EXPECT_TRUE(at::equal(any.forward(x, context), layer(x, context)));
}

TEST_P(Reader, ErrorsNameTheArgument) {
  nn::CrossAttention layer = make();
  EXPECT_EQ(message_of([&] { layer(x, x); }),
            "CrossAttention: context is [2, 7, 12], but [B, S, 10] is expected");
  EXPECT_EQ(message_of([&] { layer(context, context); }),
            "CrossAttention: x is [2, 5, 10], but [B, L, 12] is expected");
  EXPECT_EQ(message_of([&] { layer(x, context.slice(0, 0, 1)); }),
            "CrossAttention: context is [1, 5, 10], but [2, S, 10] is expected");
  const nn::KvCache cache = layer->new_cache(context);
  EXPECT_EQ(message_of([&] { layer(x, context, at::Tensor(), &cache); }),
            "CrossAttention: context and cache are given, but an undefined context is expected "
            "beside a cache, which was made of one");
  const auto refused = [&](nn::KvCache given) {
    return message_of([&] { layer(x, at::Tensor(), at::Tensor(), &given); });
  };
  EXPECT_EQ(refused({}),
            "CrossAttention: cache.keys is an undefined tensor, but what new_cache makes is "
            "expected");
  nn::KvCache other = cache;
  other.lengths = at::Tensor();
  EXPECT_EQ(refused(other),
            "CrossAttention: cache.lengths is an undefined tensor, but [2] is expected, a number "
            "for each row of x");
  other.lengths = at::full({B + 1}, S);
  EXPECT_EQ(refused(other),
            "CrossAttention: cache.lengths is [3], but [2] is expected, a number for each row of "
            "x");
  EXPECT_EQ(message_of<c10::ValueError>([&] { nn::CrossAttention(options, 0); }),
            "CrossAttention: context_dim is 0, but 1 or more is expected");
  const AttentionOptions causal = AttentionOptions().is_causal(true);
  EXPECT_EQ(message_of<c10::ValueError>([&] { nn::CrossAttention(options, C, causal); }),
            "CrossAttention: is_causal is true, but false is expected");
  options.frequencies(nn::rotary_frequencies(D));
  EXPECT_EQ(message_of<c10::ValueError>([&] { nn::CrossAttention(options, C); }),
            "CrossAttention: frequencies are given, but none are expected");
}

INSTANTIATE_TEST_SUITE_P(Nn, Reader, testing::Bool());

}  // namespace
}  // namespace qkv::test::nn_self_attention_tests
