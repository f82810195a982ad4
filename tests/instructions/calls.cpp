// Some twenty small calls of the C++ API, each of which valgrind's callgrind counts by itself.
//
//   valgrind --tool=callgrind --instr-atstart=no ... qkv_instructions [word ...]
//
// runs all calls, or those whose name has one of the words. Callgrind writes the counts of each
// under its name; `python tests/instructions` does all of that, and compares. Without valgrind the
// calls just run.
#include <ATen/Parallel.h>
#include <torch/autograd.h>
#include <torch/types.h>
#include <valgrind/callgrind.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "qkv/attention.h"
#include "qkv/kvcache.h"
#include "qkv/replace_sdpa.h"

namespace qkv::instructions {
namespace {

using at::Tensor;

struct Call {
  std::string name;
  std::function<void()> run;
};

struct Shape {
  int64_t heads = 2, kv_heads = 2, queries = 96, keys = 128, head_dim = 64;
  at::ScalarType dtype = at::kFloat;
};

struct Inputs {
  explicit Inputs(const Shape& s = {})
      : query(at::randn({1, s.heads, s.queries, s.head_dim}, s.dtype)),
        key(at::randn({1, s.kv_heads, s.keys, s.head_dim}, s.dtype)),
        value(at::randn({1, s.kv_heads, s.keys, s.head_dim}, s.dtype)) {}

  // They want gradients from now on.
  std::vector<Tensor> leaves() const {
    return {query.requires_grad_(), key.requires_grad_(), value.requires_grad_()};
  }

  Tensor query, key, value;
};

Call forward(std::string name, const AttentionOptions& options = {}, const Shape& shape = {}) {
  return {std::move(name), [=, x = Inputs(shape)] {
            const at::NoGradGuard no_gradients;
            attention(x.query, x.key, x.value, options);
          }};
}

// The backward pass alone.
Call backward(std::string name, const AttentionOptions& options = {}, const Shape& shape = {}) {
  const Inputs x(shape);
  std::vector<Tensor> leaves = x.leaves();
  if (options.bias()) leaves.push_back(*options.bias());
  const Tensor output = attention(x.query, x.key, x.value, options);
  return {std::move(name), [=, gradient = at::randn_like(output)] {
            torch::autograd::grad({output}, leaves, {gradient}, /*retain_graph=*/true);
          }};
}

// The derivatives of a gradient's product with itself, alone.
Call double_backward() {
  const std::vector<Tensor> leaves = Inputs({2, 2, 32, 64, 32}).leaves();
  const Tensor output = attention(leaves[0], leaves[1], leaves[2]);
  const auto gradients = torch::autograd::grad({output.square().sum()}, leaves, {}, true, true);
  return {"double-backward",
          [=] { torch::autograd::grad(gradients, leaves, gradients, /*retain_graph=*/true); }};
}

Call jvp() {
  return {"jvp", [x = Inputs(), t = Inputs()] {
            const at::NoGradGuard no_gradients;
            attention_jvp(x.query, x.key, x.value,
                          AttentionTangents().query(t.query).key(t.key).value(t.value));
          }};
}

// What a call costs beside its arithmetic.
std::vector<Call> latency() {
  const Inputs x({1, 1, 1, 1, 8}), w({1, 1, 1, 1, 8});
  const auto leaves = w.leaves();
  return {forward("latency", {}, {1, 1, 1, 1, 8}),
          {"latency-sdpa",
           [=] {
             const at::NoGradGuard no_gradients;
             at::scaled_dot_product_attention(x.query, x.key, x.value);
           }},
          {"latency-gradient", [=, ones = at::ones_like(w.query)] {
             torch::autograd::grad({attention(w.query, w.key, w.value)}, leaves, {ones});
           }}};
}

// One token each of two sequences, appended to a cache of 4 heads for 16.
Call decode(std::string name, at::ScalarType dtype, bool is_paged = false) {
  const bool is_int8 = dtype == at::kChar;
  const auto numbers = [&](at::IntArrayRef sizes) {
    return is_int8 ? at::randint(-127, 128, sizes, dtype) : at::randn(sizes, dtype);
  };
  const at::ScalarType rows = is_int8 ? at::kFloat : dtype;
  const Tensor query = at::randn({2, 16, 1, 64}, rows), token = at::randn({2, 4, 1, 64}, rows);
  const std::vector<int64_t> sizes =
      is_paged ? std::vector<int64_t>{48, 4, 16, 64} : std::vector<int64_t>{2, 4, 384, 64};
  const Tensor keys = numbers(sizes), values = numbers(sizes);
  auto options = KvCacheOptions().cache_seqlens(at::tensor({380, 201}, at::kInt)).causal(true);
  if (is_paged) options.block_table(at::randperm(48, at::kInt).view({2, 24}));
  if (is_int8) {
    options.k_scale(at::rand({2, 4, 384}) / 64).v_scale(at::rand({2, 4, 384}) / 64);
  }
  return {std::move(name), [=] {
            const at::NoGradGuard no_gradients;
            attention_with_kvcache(query, keys, values, token, token, options);
          }};
}

Call documents() {
  const Tensor x = at::randn({200, 4, 32}), ends = at::tensor({0, 7, 60, 61, 125, 200}, at::kInt);
  return {"documents", [=] {
            const at::NoGradGuard no_gradients;
            varlen_attention(x, x, x, ends, {}, AttentionOptions().is_causal(true));
          }};
}

std::vector<Call> all_calls() {
  const auto options = [] { return AttentionOptions(); };
  const Tensor bias = at::randn({2, 96, 128}), hidden = bias < 1;
  const Tensor learned = at::randn({2, 96, 128}).requires_grad_();
  std::vector<Call> calls = latency();
  const std::vector<Call> others = {
      forward("forward"),
      forward("forward-causal", options().is_causal(true)),
      forward("forward-mask", options().attn_mask(hidden)),
      forward("forward-bias", options().bias(bias)),
      forward("forward-window", options().window_size({{24, 0}})),
      forward("forward-softcap", options().softcap(20)),
      forward("forward-dropout", options().dropout_p(0.1)),
      forward("forward-heads", options().enable_gqa(true), {8, 2, 24, 128, 64}),
      forward("forward-bf16", {}, {2, 2, 96, 128, 64, at::kBFloat16}),
      forward("forward-f64", {}, {2, 2, 48, 64, 64, at::kDouble}),
      jvp(),
      backward("backward"),
      backward("backward-causal", options().is_causal(true)),
      backward("backward-bias", options().bias(learned)),
      backward("backward-dropout", options().dropout_p(0.1)),
      backward("backward-bf16", {}, {2, 2, 48, 64, 64, at::kBFloat16}),
      double_backward(),
      decode("decode", at::kFloat),
      decode("decode-paged", at::kBFloat16, true),
      decode("decode-int8", at::kChar),
      documents(),
  };
  calls.insert(calls.end(), others.begin(), others.end());
  return calls;
}

// Fills callgrind's last level with other lines, so that its misses are the lines that a call
// touches and those that it loses, whatever was called before.
void forget() {
  static volatile char others[4 << 20];
  for (size_t n = 0; n < sizeof(others); n += 64) others[n] = 0;
}

void run(const std::vector<std::string>& words) {
  at::set_num_threads(1);
  torch::manual_seed(0);
  const ReplacedSdpa replaced = replace_sdpa();
  const std::vector<Call> calls = all_calls();
  // What only a first call does is not counted.
  for (int warm = 0; warm < 2; ++warm)
    for (const Call& call : calls) call.run();
  CALLGRIND_START_INSTRUMENTATION;
  for (const Call& call : calls) {
    if (!words.empty() && std::none_of(words.begin(), words.end(), [&](const std::string& word) {
          return call.name.find(word) != std::string::npos;
        }))
      continue;
    torch::manual_seed(7);
    forget();
    CALLGRIND_ZERO_STATS;
    call.run();
    CALLGRIND_DUMP_STATS_AT(call.name.c_str());
  }
  CALLGRIND_STOP_INSTRUMENTATION;
}

}  // namespace
}  // namespace qkv::instructions

int main(int argc, char** argv) { qkv::instructions::run({argv + 1, argv + argc}); }
