// Documents of a packed batch that share a mask, to whose gradient all of them add: in their order,
// whichever threads run them.
#include <gtest/gtest.h>

#include "cases.h"
#include "packed.h"

namespace qkv::test {
namespace {

// Which masks the documents share.
constexpr std::array<bool, kMasks> kFirst = {true, false}, kSecond = {false, true},
                                   kBoth = {true, true};

// A head of each document of 512 queries and keys takes 40 million flops in the backward pass,
// which is more than a call that stays on one thread may have (csrc/threads/parallel.cpp).
Case masked(DType dtype) {
  Case c;
  c.dtype = dtype, c.kv_heads = 2, c.D = 16, c.Dv = 8;
  c.mask_type = MaskType::f32;
  c.grad_mask = c.grad_mask_keys = c.grad_mask_queries = true;
  return c;
}

Case with_bias(Case c) {
  c.bias_type = float_masks(c.dtype).back();
  c.grad_bias = c.grad_bias_keys = c.grad_bias_queries = true;
  return c;
}

class SharedMasksTest : public IsaTest {
 protected:
  // Expects the sums of the reference, and the bits that one document after the other leaves, with
  // any number of threads.
  void expect_sums(const Case& c, const Lengths& lengths, std::array<bool, kMasks> shared) {
    SCOPED_TRACE(::testing::Message() << c << " shared " << shared[0] << shared[1]);
    Layout layout;
    layout.share_mask = shared;
    const Packed packed(documents(c, lengths), layout);
    const PackedResults expected = run_one_by_one(packed);
    for (int num_threads : {1, 2, 3, 7}) {
      SCOPED_TRACE(::testing::Message() << num_threads << " threads");
      expect_identical(run(packed, num_threads), expected);
    }
    expect_truth(packed, expected);
  }

  static void expect_truth(const Packed& packed, const PackedResults& actual) {
    for (size_t n = 0; n < packed.size(); ++n) {
      const Workload& w = packed.document(n);
      Results its = truth(w, actual.documents[n]);
      if (packed.layout().share_mask[0]) its.grad_mask.clear();
      if (packed.layout().share_mask[1]) its.grad_bias.clear();
      SCOPED_TRACE(::testing::Message() << "document " << n << ": " << w.c);
      expect_close(actual.documents[n], its, w.c);
    }
    // As the tolerance of a sum over a batch of the largest document.
    Case c = packed.common();
    c.batch = {int64_t(packed.size())}, c.share_batch = true;
    for (size_t n = 0; n < packed.size(); ++n)
      c.L = std::max(c.L, packed.document(n).c.L), c.S = std::max(c.S, packed.document(n).c.S);
    const auto sums = true_sums(packed, actual);
    Results is, should_be;
    is.grad_mask = actual.sums[0], is.grad_bias = actual.sums[1];
    should_be.grad_mask = sums[0], should_be.grad_bias = sums[1];
    expect_close(is, should_be, c);
  }
};

QKV_FOR_EACH_ISA(SharedMasksTest);

TEST_P(SharedMasksTest, LongDocuments) {
  const Lengths lengths = {{512, 512}, {512, 512}, {300, 512}, {512, 200}};
  // The eight ways to choose a dtype, causality, and whether heads share; the first four of them
  // have every two of these in all ways.
  for (auto [way, end] = seeds(1, 8); way < end && !HasFailure(); ++way) {
    Case c = masked(way % 2 ? DType::bf16 : DType::f32);
    c.is_causal = way / 2 % 2, c.share_heads = (way + way / 2 + way / 4) % 2;
    expect_sums(c, lengths, kFirst);
  }
}

// Documents without keys, without queries and with neither, in front of long ones, between them and
// behind them.
TEST_P(SharedMasksTest, EmptyDocumentsInEveryPlace) {
  const std::vector<Lengths> empty = {{{512, 0}}, {{0, 512}}, {{0, 0}, {512, 0}, {40, 0}, {0, 9}}};
  for (auto [way, end] = seeds(2, 9); way < end && !HasFailure(); ++way) {
    const Lengths& without = empty[size_t(way % 9 / 3)];
    Lengths all = {{512, 512}, {512, 300}};
    all.insert(all.begin() + way % 3, without.begin(), without.end());
    expect_sums(masked(DType::f32), all, kFirst);
  }
}

// Many short documents: there is more than one way to divide them among threads.
TEST_P(SharedMasksTest, ManyShortDocuments) {
  Lengths lengths;
  for (int64_t n = 0; n < (kQuick ? 15 : 50); ++n)
    lengths.emplace_back(n * 7 % 40, n * 11 % 8 ? n * 5 % 60 : 0);
  for (DType dtype : {DType::f32, DType::f64, DType::f16}) {
    for (int64_t kv_heads : {1, 8}) {
      Case c = masked(dtype);
      c.kv_heads = kv_heads, c.group = 2;
      expect_sums(c, lengths, kFirst);
    }
  }
}

// Of two masks one is shared, or both are; and what one shares over documents, the other may have
// for each of them.
TEST_P(SharedMasksTest, TwoMasks) {
  const Lengths lengths = {{0, 80}, {200, 0}, {300, 300}, {300, 300}, {80, 250}, {100, 0}};
  const std::array<bool, kMasks> shared[] = {kFirst, kSecond, kBoth};
  for (auto [way, end] = seeds(1, 12); way < end && !HasFailure(); ++way) {
    Case c = with_bias(masked(DType::f32));
    c.share_heads = way / 6 % 2, c.group = 2;
    if (way % 2) {
      c.dtype = DType::bf16, c.dropout_p = 0.3, c.softcap = 2;
      c.alibi_slopes = c.grad_alibi_slopes = c.sinks = c.grad_sinks = true;
    }
    expect_sums(c, lengths, shared[way % 3]);
  }
}

// Only the gradient of the shared mask is wanted, and nothing else.
TEST_P(SharedMasksTest, NothingElse) {
  Case c = masked(DType::f32);
  c.grad_query = c.grad_key = c.grad_value = c.grad_mask_keys = c.grad_mask_queries = false;
  expect_sums(c, {{300, 0}, {300, 300}, {300, 300}, {0, 300}}, kFirst);
}

}  // namespace
}  // namespace qkv::test
