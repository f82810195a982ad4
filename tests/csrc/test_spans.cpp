// Packed batches: every document has the same bits as if it were alone, wherever it lies, and
// nothing is written beside the documents.
#include <gtest/gtest.h>

#include <cstring>

#include "cases.h"
#include "double_workload.h"
#include "packed.h"

namespace qkv::test {
namespace {

Lengths equal(const Sizes& lengths) {
  Lengths all;
  for (int64_t length : lengths) all.emplace_back(length, length);
  return all;
}

Case small(DType dtype) {
  Case c;
  c.dtype = dtype, c.kv_heads = 2, c.group = 2, c.D = 16, c.Dv = 8;
  return c;
}

// All options that do without masks, and their gradients.
Case with_options(Case c) {
  c.is_causal = true, c.window_left = 40, c.softcap = 3, c.dropout_p = 0.2, c.dropout_batch = 7;
  c.alibi_slopes = c.grad_alibi_slopes = c.sinks = c.grad_sinks = true;
  return c;
}

// Two floating masks, and all their gradients.
Case with_masks(Case c) {
  c.mask_type = MaskType::f32, c.bias_type = float_masks(c.dtype).back();
  c.grad_mask = c.grad_mask_keys = c.grad_mask_queries = true;
  c.grad_bias = c.grad_bias_keys = c.grad_bias_queries = true;
  return c;
}

class SpansTest : public IsaTest {
 protected:
  static constexpr int kThreads[] = {1, 2, 5};

  void expect_as_alone(const std::vector<Case>& cases, const Layout& layout = {}) {
    SCOPED_TRACE(::testing::Message() << cases.size() << " documents, " << cases[0]);
    const Packed packed(cases, layout);
    const PackedResults alone = run_one_by_one(packed);
    for (int num_threads : kThreads) {
      SCOPED_TRACE(::testing::Message() << num_threads << " threads");
      expect_identical(run(packed, num_threads), alone);
    }
  }

  // The derivatives in directions, and hard attention.
  void expect_other_passes_as_alone(const std::vector<Case>& cases, const Layout& layout = {}) {
    SCOPED_TRACE(::testing::Message() << cases.size() << " documents, " << cases[0]);
    const Packed packed(cases, layout);
    std::vector<JvpResults> jvp_alone;
    std::vector<Results> hard_alone;
    PackedResults double_alone;
    for (size_t n = 0; n < packed.size(); ++n) {
      jvp_alone.push_back(test::run_jvp(packed.document(n)));
      hard_alone.push_back(test::run_hard(packed.document(n)));
      double_alone.documents.push_back(test::run_double(packed.document(n)));
    }
    for (int num_threads : kThreads) {
      SCOPED_TRACE(::testing::Message() << num_threads << " threads");
      expect_identical(run_double(packed, num_threads), double_alone);
      const std::vector<JvpResults> jvp = run_jvp(packed, num_threads);
      const std::vector<Results> hard = run_hard(packed, num_threads);
      for (size_t n = 0; n < packed.size(); ++n) {
        SCOPED_TRACE(::testing::Message() << "document " << n);
        expect_same_bits(jvp[n], jvp_alone[n]);
        expect_identical(hard[n], hard_alone[n]);
      }
    }
  }
};

QKV_FOR_EACH_ISA(SpansTest);

const Sizes kManyLengths = {0, 1, 5, 16, 33, 33, 70, 129, 300, 700, 0, 0, 2, 2, 2, 1, 0};
const Sizes kFewLengths = {0, 1, 5, 33, 33, 70, 0, 129, 0};
const Sizes& lengths() { return kQuick ? kFewLengths : kManyLengths; }

TEST_P(SpansTest, Documents) {
  for (DType dtype : kDTypes) {
    expect_as_alone(documents(small(dtype), equal(lengths())));
    expect_as_alone(documents(with_options(small(dtype)), equal(lengths())));
    expect_as_alone(documents(with_masks(small(dtype)), equal(lengths())));
  }
}

TEST_P(SpansTest, OtherPasses) {
  for (DType dtype : kDTypes) {
    const Lengths some = equal({0, 40, 3, 3, 0, 170, 1, 0});
    expect_other_passes_as_alone(documents(small(dtype), some));
    expect_other_passes_as_alone(documents(with_masks(with_options(small(dtype))), some));
  }
}

// Queries and keys of different lengths, and decode steps, whose keys are split.
TEST_P(SpansTest, QueriesAndKeysOfDifferentLengths) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    Lengths reversed = equal(lengths()), steps = reversed;
    for (size_t n = 0; n < reversed.size(); ++n) reversed[n].first = lengths().rbegin()[n];
    for (auto& [L, S] : steps) L = 1, S *= kQuick ? 9 : 3;
    expect_as_alone(documents(small(dtype), reversed));
    expect_as_alone(documents(small(dtype), steps));
    expect_other_passes_as_alone(documents(small(dtype), steps));
  }
}

// Documents without keys, without queries, and with neither: in front, among the others, at the
// end, and several in a row.
TEST_P(SpansTest, EmptyDocumentsInEveryPlace) {
  const Lengths others = {{40, 40}, {17, 60}, {17, 60}, {9, 3}};
  const std::vector<Lengths> empty = {
      {{0, 0}}, {{30, 0}}, {{0, 30}}, {{30, 0}, {0, 30}, {0, 0}, {30, 0}, {30, 0}}};
  for (const Lengths& without : empty) {
    for (size_t place = 0; place <= others.size() && !HasFailure(); ++place) {
      Lengths all = others;
      all.insert(all.begin() + std::ptrdiff_t(place), without.begin(), without.end());
      for (DType dtype : {DType::f32, DType::bf16}) {
        const Case c = with_masks(with_options(small(dtype)));
        expect_as_alone(documents(c, all), {{place % 2 > 0, place % 3 > 0}});
        expect_other_passes_as_alone(documents(c, all));
      }
    }
    expect_as_alone(documents(with_options(small(DType::f64)), without));
    expect_other_passes_as_alone(documents(with_options(small(DType::f64)), without));
  }
}

// Documents of one size are cut alike. There may be one more that is larger than all of them.
TEST_P(SpansTest, DocumentsOfOneSize) {
  for (DType dtype : {DType::f32, DType::f16}) {
    Sizes lengths(kQuick ? 5 : 13, 64);
    expect_as_alone(documents(small(dtype), equal(lengths)));
    lengths.insert(lengths.begin() + 3, 600);
    expect_as_alone(documents(small(dtype), equal(lengths)));
    expect_as_alone(documents(with_options(small(dtype)), equal(lengths)));
  }
}

// Keys and values lie in several batch items, which spans choose, and so do their gradients.
TEST_P(SpansTest, KeysInSeveralBatchItems) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    Layout layout;
    layout.key_items = 3;
    const Case c = with_masks(with_options(small(dtype)));
    expect_as_alone(documents(c, equal(lengths())), layout);
    expect_other_passes_as_alone(documents(c, {{3, 40}, {1, 900}, {20, 20}, {0, 5}}), layout);
  }
}

// Every three documents have a seed for dropout, as if they were a call of their own.
TEST_P(SpansTest, SeedsOfDocuments) {
  for (DType dtype : {DType::f32, DType::f64}) {
    Case c = with_options(small(dtype));
    c.own_seeds = true, c.dropout_p = 0.5;
    expect_as_alone(documents(c, equal({20, 20, 0, 20, 70, 5, 0, 33})));
  }
}

// Any options, strides and heads; of what is wanted of the documents, anything.
TEST_P(SpansTest, RandomCases) {
  for (auto [number, end] = seeds(3, 80); number < end && !HasFailure(); ++number) {
    const uint64_t seed = 3000 + uint64_t(number);
    Random random(seed);
    Case c = random_case(seed);
    c.batch.clear();
    c.weights = c.grad_weights = c.share_batch = false;
    c.strided = false;  // the order of a dot product over columns that lie apart is another one
    c.shard.seqlen_q = c.shard.seqlen_k = 0;  // those of each document
    const int64_t most = std::max<int64_t>(40, 4000 / (c.heads() * (c.D + c.Dv) / 8 + 1));
    Lengths lengths(size_t(draw(random, 1, 9)));
    for (auto& [L, S] : lengths) {
      if (&L > &lengths[0].first && draw(random, 0, 2) == 0) {
        L = (&L)[-2], S = (&S)[-2];
        continue;
      }
      L = draw(random, 0, 3) ? draw(random, 1, most) : draw(random, 0, 1);
      S = draw(random, 0, 2) ? L : draw(random, 0, 3) ? draw(random, 1, most) : 0;
    }
    const Layout layout{{bool(draw(random, 0, 1)), bool(draw(random, 0, 1))},
                        draw(random, 1, 2),
                        bool(draw(random, 0, 1)),
                        seed};
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    expect_as_alone(documents(c, lengths), layout);
  }
}

TEST_P(SpansTest, NoDocuments) {
  const Packed packed({small(DType::f32)}, {});
  Problem p = packed.problem(3);
  p.batch_sizes[0] = 0;
  attention_forward(p, {});
  attention_backward(p, {});
  attention_jvp(p, {}, {});
  attention_hard(p, {});
}

}  // namespace
}  // namespace qkv::test
