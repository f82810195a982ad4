// Keys and values in pages give the same results as without pages, and nothing but the pages of the
// table is read.
#include <gtest/gtest.h>

#include <vector>

#include "cases.h"
#include "packed.h"
#include "paged.h"

namespace qkv::test {
namespace {

class PagesTest : public IsaTest {};

QKV_FOR_EACH_ISA(PagesTest);

// Expects the truth of the Workload without pages, and with pages that are laid out by `seed`.
void expect_truth_of_pages(Workload& w, int64_t size, uint64_t seed, bool repeat = true) {
  SCOPED_TRACE(::testing::Message() << "pages of " << size << ", " << w.c);
  const Paged paged(w, size, seed, repeat);
  const Results actual = run_forward(w, paged.problem());
  expect_close(actual, forward_truth(w), w.c);
}

Case random_paged_step(Random& random) {
  Case c;
  do {
    c.dtype = draw_dtype(random);
    c.kv_heads = draw(random, 1, 3), c.group = draw_from<int64_t>(random, {1, 2, 4, 8});
    c.L = draw(random, 0, 2) ? draw(random, 1, 16) : draw(random, 1, 2);
    if (draw(random, 0, 9) == 0) c.L = 70;
    c.S = draw(random, 0, 4) ? draw(random, 1, 400) : draw(random, 1, 2500);
    c.D = draw_from<int64_t>(random, {3, 8, 64, 80, 100, 128});
    c.Dv = draw(random, 0, 2) ? c.D : draw_from<int64_t>(random, {5, 16, 64, 80, 128});
  } while (c.heads() * c.L * c.S * (c.D + c.Dv) > (kQuick ? 1 << 18 : 1 << 21));
  c.mask_type = MaskType::none;
  if (draw(random, 0, 1)) draw_options(random, c);
  if (draw(random, 0, 3) == 0) c.key_head_repeat = c.kv_heads;
  if (draw(random, 0, 3) == 0) c.value_head_repeat = c.kv_heads;
  c.at_front = draw(random, 0, 1);
  c.num_threads = int(draw(random, 1, 3));
  c.seed = random();
  return c;
}

TEST_P(PagesTest, RandomCases) {
  auto [n, end] = seeds(5, 100);
  Random random(1 + n);
  for (; n < end && !HasFailure(); ++n) {
    Workload w(random_paged_step(random));
    expect_truth_of_pages(w, draw_from<int64_t>(random, {1, 3, 16, 64, 256}), random());
  }
}

// The last page has any number of rows, and there may be no page at all.
TEST_P(PagesTest, EveryLength) {
  for (DType dtype : kDTypes) {
    for (int64_t S = 0; S <= 70 && !HasFailure(); S += kQuick ? 9 : 1) {
      Case c;
      c.dtype = dtype, c.group = 2, c.L = S % 3 ? 1 : 5, c.S = S, c.D = 16, c.Dv = 8;
      Workload w(c);
      expect_truth_of_pages(w, S % 2 ? 16 : 7, uint64_t(S));
    }
  }
}

// Where pages lie changes no bit, nor does the number of threads.
TEST_P(PagesTest, AnyOrderAndAnyNumberOfThreads) {
  for (DType dtype : kDTypes) {
    for (int64_t L : {1, 3, 40}) {
      Case c;
      c.dtype = dtype, c.kv_heads = 2, c.group = 2, c.L = L, c.S = kQuick ? 300 : 1700;
      c.D = c.Dv = 16;
      Workload w(c);
      const Paged first(w, 16, 1), second(w, 16, 2, false);
      const Results expected = run_forward(w, first.problem());
      for (int num_threads : {1, 2, 5}) {
        w.c.num_threads = num_threads;
        expect_identical(run_forward(w, second.problem()), expected);
      }
    }
  }
}

// Keys and values of more than 1 MiB, which come from memory, and are read up to the last row and
// nothing beyond.
TEST_P(PagesTest, FromMemory) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.kv_heads = 8, c.L = 1, c.D = c.Dv = 64;
    for (int64_t S : {577, 608}) {
      c.S = S;
      Workload w(c);
      expect_truth_of_pages(w, 16, uint64_t(S));
    }
  }
}

// NaN lies in keys and values that no query sees.
TEST_P(PagesTest, HiddenKeysDoNotLeak) {
  for (DType dtype : kDTypes) {
    for (int64_t L : {1, 9}) {
      Case c;
      c.dtype = dtype, c.group = 4, c.L = L, c.S = 600, c.D = 64, c.Dv = 32;
      c.window_left = 100, c.window_right = 0;
      Workload w(c);
      for (int64_t j = 0; j < c.S - c.L - 100; ++j) {
        for (int64_t d = 0; d < c.D; ++d) w.key.set({0, j, d}, kNaN);
        for (int64_t d = 0; d < c.Dv; ++d) w.value.set({0, j, d}, kNaN);
      }
      expect_truth_of_pages(w, 16, 1, false);
    }
  }
}

// Every sequence of a batch has pages of its own, or, if one page has room for it, lies in batch
// item `page` of the keys and values, which are as far apart as pages.
void expect_as_alone(Case c, uint64_t seed) {
  constexpr int64_t kSize = 16;
  Random random(seed);
  std::vector<Case> cases;
  for (int n = 0; n < 12; ++n, ++c.seed) {
    if (draw(random, 0, 3)) c.L = draw(random, 0, 9), c.S = draw(random, 0, n % 3 ? 900 : kSize);
    cases.push_back(c);
  }
  Packed packed(cases, {});
  std::vector<Workload*> sequences;
  for (size_t n = 0; n < packed.size(); ++n) sequences.push_back(&packed.document(n));
  const Paged paged(sequences, kSize, random());
  Problem p = packed.problem(1);
  std::vector<Span> spans(p.spans, p.spans + packed.size());
  paged.put_in_pages(p);
  p.spans = spans.data();
  p.key.strides.batch[0] = p.pages.key_stride, p.value.strides.batch[0] = p.pages.value_stride;
  for (size_t n = 0; n < packed.size(); ++n) {
    const bool in_one_page = 0 < cases[n].S && cases[n].S <= kSize && n % 2;
    spans[n].key_begin = 0;
    spans[n].key_item = in_one_page ? *paged.table(n) : 0;
    spans[n].pages = in_one_page ? nullptr : paged.table(n);
  }
  for (int num_threads : {1, 3, 5}) {
    p.num_threads = num_threads;
    const std::vector<Results> actual = run_forward(packed, p);
    for (size_t n = 0; n < packed.size(); ++n) {
      SCOPED_TRACE(::testing::Message() << "sequence " << n << ": " << packed.document(n).c);
      expect_identical(actual[n], run_forward(packed.document(n), packed.document(n).problem()));
    }
  }
}

TEST_P(PagesTest, Sequences) {
  auto [n, end] = seeds(3, 30);
  Random random(2 + n);
  for (; n < end && !HasFailure(); ++n) {
    Case c = random_paged_step(random);
    c.shard = {};
    expect_as_alone(c, random());
  }
}

}  // namespace
}  // namespace qkv::test
