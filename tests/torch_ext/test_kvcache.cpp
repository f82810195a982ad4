// qkv::attention_with_kvcache against attention on the rows that each batch item sees.
#include "qkv/kvcache.h"

#include "common.h"

namespace qkv::test::kvcache_tests {
namespace {

constexpr double kTolerance = 1e-12;

// A batch of two items with 5 and 9 keys, to each of which 3 are appended.
class KvCache : public testing::Test {
 protected:
  static at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

  const std::vector<int64_t> lengths = {5, 9};
  const int64_t added = 3;
  const at::Tensor cache_seqlens = at::tensor(lengths, at::kInt);
  const at::Tensor query = random({2, 4, 3, 8});
  const at::Tensor key = random({2, 2, added, 8}), value = random({2, 2, added, 6});
  at::Tensor k_cache = random({2, 2, 16, 8}), v_cache = random({2, 2, 16, 6});

  // The output and lse of batch item b, whose keys and values are in rows [B, Hkv, S, *].
  std::tuple<at::Tensor, at::Tensor> expected(const at::Tensor& keys, const at::Tensor& values,
                                              int64_t b, AttentionOptions options) const {
    const auto rows = [&](const at::Tensor& cache, const at::Tensor& more) {
      return at::cat({cache[b].slice(1, 0, lengths[b]), more[b]}, 1);
    };
    return reference(query[b], rows(keys, key), rows(values, value), options.enable_gqa(true));
  }
};

TEST_F(KvCache, AppendsAndAttends) {
  const at::Tensor keys = k_cache.clone(), values = v_cache.clone();
  const auto options = KvCacheOptions().cache_seqlens(cache_seqlens).causal(true).softcap(2);
  const auto [output, lse] = attention_with_kvcache(query, k_cache, v_cache, key, value, options);
  for (int64_t b = 0; b < 2; ++b) {
    const auto [o, l] =
        expected(keys, values, b, AttentionOptions().window_size({{-1, 0}}).softcap(2));
    expect_close(output[b], o, kTolerance);
    expect_close(lse[b], l, kTolerance);
    keys[b].slice(1, lengths[b], lengths[b] + added).copy_(key[b]);
    values[b].slice(1, lengths[b], lengths[b] + added).copy_(value[b]);
  }
  EXPECT_TRUE(at::equal(k_cache, keys));
  EXPECT_TRUE(at::equal(v_cache, values));
}

TEST_F(KvCache, BlocksAreLikeRows) {
  // The 16 rows of each batch item become 4 blocks of 4 rows, in reverse order.
  const auto blocks = [](const at::Tensor& cache) {
    return cache.unflatten(2, {4, 4}).transpose(1, 2).flatten(0, 1).flip(0).contiguous();
  };
  const at::Tensor k_blocks = blocks(k_cache), v_blocks = blocks(v_cache);
  const at::Tensor table = at::arange(7, -1, -1, at::kLong).view({2, 4});
  const auto options = KvCacheOptions().cache_seqlens(cache_seqlens).window_size({{6, 1}});
  const auto [output, lse] = attention_with_kvcache(query, k_cache, v_cache, key, value, options);
  const auto [paged, paged_lse] = attention_with_kvcache(
      query, k_blocks, v_blocks, key, value, KvCacheOptions(options).block_table(table));
  expect_close(paged, output, kTolerance);
  expect_close(paged_lse, lse, kTolerance);
  EXPECT_TRUE(at::equal(k_blocks, blocks(k_cache)));
  EXPECT_TRUE(at::equal(v_blocks, blocks(v_cache)));
}

TEST_F(KvCache, ReadsWhatThereIs) {
  const auto [output, lse] = attention_with_kvcache(query, k_cache, v_cache);
  const auto [o, l] = reference(query, k_cache, v_cache, AttentionOptions().enable_gqa(true));
  expect_close(output, o, kTolerance);
  expect_close(lse, l, kTolerance);
}

TEST_F(KvCache, ChosenRowsAndHiddenKeys) {
  const auto options = KvCacheOptions()
                           .cache_seqlens(cache_seqlens)
                           .cache_batch_idx(at::tensor({1, 1}))
                           .cache_leftpad(at::tensor({2, 0}));
  const auto output = std::get<0>(
      attention_with_kvcache(query, k_cache, v_cache, std::nullopt, std::nullopt, options));
  const auto gqa = AttentionOptions().enable_gqa(true);
  const auto o = [&](int64_t b, int64_t begin, int64_t end) {
    return std::get<0>(
        reference(query[b], k_cache[1].slice(1, begin, end), v_cache[1].slice(1, begin, end), gqa));
  };
  expect_close(output[0], o(0, 2, 5), kTolerance);
  expect_close(output[1], o(1, 0, 9), kTolerance);
}

TEST_F(KvCache, ErrorsLeaveTheCachesAlone) {
  const at::Tensor keys = k_cache.clone();
  const auto message = [&](const KvCacheOptions& options) {
    return message_of(
        [&] { attention_with_kvcache(query, k_cache, v_cache, key, value, options); });
  };
  EXPECT_EQ(
      message(KvCacheOptions().cache_seqlens(at::tensor({5, 14}))),
      "attention_with_kvcache: cache_seqlens[1] is 14 and key has 3 rows, but k_cache has room "
      "for 16");
  EXPECT_EQ(message({}),
            "attention_with_kvcache: key is given, but cache_seqlens is None: the cache is full; "
            "expected the lengths before it is appended");
  k_cache.requires_grad_();
  EXPECT_EQ(message(KvCacheOptions().cache_seqlens(cache_seqlens)),
            "attention_with_kvcache: k_cache requires grad, but this is for inference only, it has "
            "no gradient; call it under torch.no_grad() or detach() that");
  EXPECT_TRUE(at::equal(k_cache, keys));
}

TEST(VarlenAttention, BlockTable) {
  const at::Tensor query = at::randn({6, 2, 8}, at::kDouble);
  const at::Tensor pool = at::randn({4, 3, 2, 8}, at::kDouble);
  const at::Tensor cu_seq_q = at::tensor({0, 4, 6}), used = at::tensor({5, 3});
  const at::Tensor table = at::tensor({3, 0, 1, 2}).view({2, 2});
  const auto [output, lse] =
      varlen_attention(query, pool, pool, cu_seq_q, std::nullopt, {}, used, table);
  const at::Tensor keys = at::cat({pool[3], pool[0].slice(0, 0, 2), pool[1]});
  const auto [o, l] = varlen_attention(query, keys, keys, cu_seq_q, at::tensor({0, 5, 8}));
  expect_close(output, o, kTolerance);
  expect_close(lse, l, kTolerance);
}

}  // namespace
}  // namespace qkv::test::kvcache_tests
