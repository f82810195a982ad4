// Bad input: the error names the argument, what it was and what was expected.
#include "common.h"

namespace qkv::test {
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
  EXPECT_SAYS(error(query.to(at::kLong), key, value), "query is int64");
  EXPECT_SAYS(error(query.to(at::kComplexDouble), key, value), "query is complex128");
  EXPECT_SAYS(error<c10::NotImplementedError>(query.to(at::kBFloat16), key, value),
              "query is bfloat16, which is not supported yet");
}

TEST_F(Errors, Masks) {
  const auto with = [](const at::Tensor& mask) { return AttentionOptions().attn_mask(mask); };
  EXPECT_SAYS(error(with(at::zeros({5, 6}))), "attn_mask has the shape [5, 6]");
  EXPECT_SAYS(error(with(at::zeros({1, 1, 1, 5, 7}))), "does not broadcast");
  EXPECT_SAYS(error(with(at::zeros({5, 7}, at::kInt))), "attn_mask is int32");
  EXPECT_SAYS(error<c10::NotImplementedError>(with(randn({5, 7}))), "attn_mask requires grad");
}

TEST_F(Errors, Options) {
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().scale(std::nan(""))), "scale is nan");
  EXPECT_SAYS(error<c10::ValueError>(AttentionOptions().dropout_p(1.5)), "dropout_p is 1.5");
  EXPECT_SAYS(error<c10::NotImplementedError>(AttentionOptions().dropout_p(0.5)),
              "dropout is not implemented yet");
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
}  // namespace qkv::test
