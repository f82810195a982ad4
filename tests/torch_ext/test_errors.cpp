// Bad input gives an error that names the argument, what it was and what was expected.
#include "common.h"

namespace qkv::test::errors_tests {
namespace {

class Errors : public testing::Test {
 protected:
  at::Tensor query = randn({2, 4, 5, 8}), key = randn({2, 4, 7, 8}), value = randn({2, 4, 7, 8});

  template <class Error = c10::Error>
  std::string error(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const AttentionOptions& options = {}) {
    return message_of<Error>([&] { attention(q, k, v, options); });
  }
  template <class Error = c10::Error>
  std::string error(const AttentionOptions& options) {
    return error<Error>(query, key, value, options);
  }
};

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << (message)

TEST_F(Errors, Shapes) {
  EXPECT_SAYS(error(randn({8}), key, value), "query has the shape [8]");
  EXPECT_SAYS(error(query, key.slice(-1, 0, 7), value), "key has the shape [2, 4, 7, 7]");
  EXPECT_SAYS(error(query, key, value.slice(-2, 0, 6)), "value has the shape [2, 4, 6, 8]");
  EXPECT_SAYS(error(query, key.slice(1, 0, 3), value), "key has 3 heads and query 4");
  EXPECT_SAYS(error(query, randn({3, 4, 7, 8}), value), "do not broadcast: dimension -4");
}

TEST_F(Errors, Heads) {
  const auto gqa = AttentionOptions().enable_gqa(true);
  EXPECT_SAYS(error(query, key.slice(1, 0, 3), value, gqa), "heads of key must divide");
  EXPECT_SAYS(error(query, key, value.slice(1, 0, 3), gqa), "heads of value must divide");
}

TEST_F(Errors, Dtypes) {
  EXPECT_SAYS(error(query, key.to(at::kFloat), value), "key is float32, but query is float64");
  EXPECT_SAYS(error(query.to(at::kLong), key, value),
              "query is int64, but float32, float64, bfloat16 or float16 is expected");
  EXPECT_SAYS(error(query.to(at::kComplexDouble), key, value), "query is complex128");
  const auto half = query.to(at::kHalf), bfloat = query.to(at::kBFloat16);
  EXPECT_SAYS(error(bfloat, key, value), "key is float64, but query is bfloat16");
  EXPECT_SAYS(error(half, half, half.to(at::kBFloat16)), "value is bfloat16, but query is float16");
  EXPECT_SAYS(error(half, half.to(at::kFloat), half), "key is float32, but query is float16");
  EXPECT_SAYS(error(query.to(at::kFloat8_e5m2), key, value), "query is float8_e5m2");
}

TEST_F(Errors, Masks) {
  const auto with = [](const at::Tensor& mask) { return AttentionOptions().attn_mask(mask); };
  EXPECT_SAYS(error(with(at::zeros({5, 6}))), "attn_mask has the shape [5, 6]");
  EXPECT_SAYS(error(with(at::zeros({1, 1, 1, 5, 7}))), "does not broadcast");
  EXPECT_SAYS(error(with(at::zeros({5, 7}, at::kInt))), "attn_mask is int32");
  EXPECT_SAYS(error(with(at::zeros({5, 7}, at::kHalf))),
              "attn_mask is float16, but bool, float32 or query's dtype (float64) is expected");
  const auto half = query.to(at::kHalf), half_key = key.to(at::kHalf);
  for (const auto dtype : {at::kBFloat16, at::kDouble})
    EXPECT_SAYS(error(half, half_key, half_key, with(at::zeros({5, 7}, dtype))),
                "but bool, float32 or query's dtype (float16) is expected");
}

TEST_F(Errors, Options) {
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().scale(std::nan(""))), "scale is nan");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().dropout_p(1.5)), "dropout_p is 1.5");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().dropout_p(std::nan(""))),
              "dropout_p is nan");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().softcap(-1)), "softcap is -1");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().softcap(HUGE_VAL)), "softcap is inf");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().window_size({{3, -2}})),
              "window_size is (3, -2)");
}

TEST_F(Errors, SlopesAndSinks) {
  const auto slopes = [](const at::Tensor& t) { return AttentionOptions().alibi_slopes(t); };
  const auto sinks = [](const at::Tensor& t) { return AttentionOptions().sinks(t); };
  EXPECT_SAYS(error(slopes(at::ones({3}))),
              "alibi_slopes has the shape [3], which does not broadcast to [..., H] = [2, 4]");
  EXPECT_SAYS(error(sinks(at::ones({2, 1, 4}))), "sinks has the shape [2, 1, 4]");
  EXPECT_SAYS(error(slopes(at::ones({4}, at::kInt))), "alibi_slopes is int32");
  EXPECT_SAYS(error(sinks(at::ones({4}, at::kMeta))), "sinks is on meta");
}

TEST_F(Errors, Documents) {
  const auto q = randn({6, 4, 8}), k = randn({9, 4, 8});
  const auto cu_seq = [](std::vector<int64_t> ends, at::ScalarType type = at::kInt) {
    return at::tensor(ends).to(type);
  };
  const auto error = [&](const at::Tensor& cu_seq_q, const at::Tensor& cu_seq_k,
                         const AttentionOptions& options = {},
                         std::optional<at::Tensor> used = std::nullopt) {
    return message_of([&] { varlen_attention(q, k, k, cu_seq_q, cu_seq_k, options, used); });
  };
  const auto good_q = cu_seq({0, 2, 6}), good_k = cu_seq({0, 5, 9});
  EXPECT_SAYS(error({}, good_k), "cu_seq_q is an undefined tensor");
  EXPECT_SAYS(error(cu_seq({-1, 2, 6}), good_k), "cu_seq_q begins with -1");
  EXPECT_SAYS(error(cu_seq({0, 4, 3}), good_k), "cu_seq_q falls from 4 to 3 at element 2");
  EXPECT_SAYS(error(cu_seq({0, 2, 7}), good_k), "cu_seq_q ends with 7, but query has only 6");
  EXPECT_SAYS(error(good_q, cu_seq({0, 5, 10})), "cu_seq_k ends with 10, but key has only 9");
  EXPECT_SAYS(error(good_q, cu_seq({0, 5, 7, 9})), "cu_seq_k has the shape [4]");
  EXPECT_SAYS(error(cu_seq({}), cu_seq({})), "cu_seq_q has the shape [0]");
  EXPECT_SAYS(error(cu_seq({0, 6}, at::kDouble), good_k), "cu_seq_q is float64");
  EXPECT_SAYS(error(good_q.unsqueeze(0), good_k), "cu_seq_q has 2 dimensions");
  EXPECT_SAYS(error(good_q, good_k, {}, cu_seq({5, 5})), "seqused_k[1] is 5, but document 1 has 4");
  EXPECT_SAYS(error(good_q, good_k, {}, cu_seq({-1, 4})), "seqused_k[0] is -1");
  EXPECT_SAYS(error(good_q, good_k, {}, cu_seq({5})), "seqused_k has the shape [1]");
  EXPECT_SAYS(error(good_q, good_k, AttentionOptions().attn_mask(at::zeros({6, 2}))),
              "attn_mask has the shape [6, 2], but document 0 has");
  EXPECT_SAYS(error(good_q, good_k, AttentionOptions().sinks(at::zeros({3, 4}))),
              "sinks has the shape [3, 4], which does not broadcast to [N, H] = [2, 4]");
  EXPECT_SAYS(message_of([&] { varlen_attention(q.unsqueeze(0), k, k, good_q); }),
              "query has the shape [1, 6, 4, 8], but 3 dimensions are expected: [T, H, D]");
}

TEST_F(Errors, WeightsAndHardAttention) {
  EXPECT_SAYS(message_of<c10::ValueError>([&] { attention_weights(query, key, {}, "rows"); }),
              "reduce is 'rows', but None, 'heads' or 'queries' is expected");
  EXPECT_SAYS(message_of([&] { attention_weights(query, key.slice(-1, 1)); }),
              "attention_weights: key has the shape [2, 4, 7, 7]");
  EXPECT_SAYS(message_of([&] { attention_weights({}, key); }), "query is an undefined tensor");
  EXPECT_SAYS(message_of([&] { hard_attention(query, key, value.slice(-2, 1)); }),
              "hard_attention: value has the shape [2, 4, 6, 8]");
  EXPECT_SAYS(message_of<c10::ValueError>(
                  [&] { hard_attention(query, key, value, AttentionOptions().dropout_p(0.1)); }),
              "dropout_p is 0.1, but 0 is expected");
  EXPECT_SAYS(message_of([&] {
                hard_attention(query, key, value, AttentionOptions().sinks(at::ones({4})));
              }),
              "sinks is given");
}

TEST_F(Errors, OtherTensors) {
  EXPECT_SAYS(error({}, key, value), "query is an undefined tensor");
  EXPECT_SAYS(error(query, {}, value), "key is an undefined tensor");
  EXPECT_SAYS(error({}, {}, {}), "query is an undefined tensor");
  EXPECT_SAYS(error(query, key.to(at::kMeta), value), "key is on meta, but query is on cpu");
  EXPECT_SAYS(error(query[0][0].detach().to_sparse(), key, value), "query has the layout Sparse");
}

TEST_F(Errors, SizesThatOverflow) {
  const auto one = at::zeros({1, 1});
  const auto long_one = one.expand({int64_t(1) << 32, 1});
  EXPECT_SAYS(error(long_one, long_one, long_one), "too large");
}

TEST_F(Errors, MoreBatchDimensionsThanTheKernelsTake) {
  const auto q = randn({2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 3, 4});
  const auto k = randn({2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 1, 3, 4});
  EXPECT_SAYS(error(q, k, k), "cannot be merged");
}

}  // namespace
}  // namespace qkv::test::errors_tests
