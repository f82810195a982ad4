// Masks and spans that hide whole tiles, which are not computed: padding on either side, holes,
// blocks of documents, triangles.
#include <gtest/gtest.h>

#include <functional>

#include "cases.h"

namespace qkv::test {
namespace {

class HiddenTilesTest : public IsaTest {};

QKV_FOR_EACH_ISA(HiddenTilesTest);

struct Pattern {
  const char* name;
  std::function<bool(int64_t i, int64_t j)> hides;
  bool of_keys;  // the same keys for all rows
};

const Pattern kPatterns[] = {
    {"right", [](int64_t, int64_t j) { return j >= 150; }, true},
    {"left", [](int64_t, int64_t j) { return j < 290; }, true},
    {"middle", [](int64_t, int64_t j) { return j >= 20 && j < 405; }, true},
    {"all", [](int64_t, int64_t) { return true; }, true},
    {"triangle", [](int64_t i, int64_t j) { return j > 3 * i; }, false},
    {"documents", [](int64_t i, int64_t j) { return i / 30 != j / 110; }, false},
    {"holes", [](int64_t i, int64_t j) { return (j / 37 + i / 5) % 3 == 0; }, false},
    {"one row sees", [](int64_t i, int64_t) { return i != 40; }, false},
};

// Hides what the pattern says, besides what is hidden already; the same for all heads.
void hide(Workload& w, Tensor& mask, bool boolean, const Pattern& pattern) {
  for (int64_t h = 0; h < w.c.heads(); ++h)
    for (int64_t i = 0; i < w.c.L; ++i)
      for (int64_t j = 0; j < w.c.S; ++j)
        if (pattern.hides(i, j)) mask.set({h, i, j}, boolean ? 0 : -kInf);
}

Case long_case(DType dtype, int64_t L) {
  Case c;
  c.dtype = dtype, c.L = L, c.S = 430, c.group = 2, c.num_threads = 2;
  c.weights = c.grad_weights = true, c.alibi_slopes = c.grad_alibi_slopes = true;
  return c;
}

TEST_P(HiddenTilesTest, AnyPattern) {
  int number = 0;
  for (DType dtype : kDTypes) {
    for (const Pattern& pattern : kPatterns) {
      for (MaskType type : {MaskType::boolean, float_masks(dtype).back()}) {
        for (int64_t L : {90, 4}) {
          if (!takes(number++, 3)) continue;
          Case c = long_case(dtype, L);
          c.mask_type = type, c.grad_mask = c.float_mask();
          // A mask of the keys has no rows in memory, either.
          if (pattern.of_keys) c.mask_strides = {0, 0, 1}, c.grad_mask = false;
          SCOPED_TRACE(pattern.name);
          Workload w(c);
          hide(w, w.mask, type == MaskType::boolean, pattern);
          expect_truth(w);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The keys that the pattern shows a row, as begins and ends of spans in no order: the middle of the
// last run of them, and then all runs from the last to the first.
std::vector<int64_t> spans_of_row(const Pattern& pattern, int64_t i, int64_t S) {
  std::vector<int64_t> ends;
  int64_t end = S;  // of a run; no key of [j, end) is hidden
  for (int64_t j = S; j >= 0; --j) {
    if (j > 0 && !pattern.hides(i, j - 1)) continue;
    if (j < end) {
      if (ends.empty()) ends = {j + (end - j) / 3, end - (end - j) / 3};
      ends.insert(ends.end(), {j, end});
    }
    end = j - 1;
  }
  return ends;
}

// The spans of what the pattern shows each row, as many for every row; the same for all heads.
void show(Workload& w, const Pattern& pattern) {
  std::vector<std::vector<int64_t>> ends;
  size_t most = 2;
  for (int64_t i = 0; i < w.c.L; ++i) {
    ends.push_back(spans_of_row(pattern, i, w.c.S));
    most = std::max(most, ends.back().size());
  }
  w.c.key_spans = int64_t(most) / 2;
  const Sizes sizes = {w.c.heads(), w.c.L, 2 * w.c.key_spans};
  w.key_spans = Tensor(reference::Type::int32, sizes, {0, 2 * w.c.key_spans, 1});
  for (int64_t i = 0; i < w.c.L; ++i)
    for (int64_t n = 0; n < 2 * w.c.key_spans; ++n)
      w.key_spans.set({0, i, n}, size_t(n) < ends[i].size() ? double(ends[i][size_t(n)]) : 7);
}

// Spans show the same as a boolean mask, to the last bit.
TEST_P(HiddenTilesTest, Spans) {
  int number = 0;
  for (DType dtype : kDTypes) {
    for (const Pattern& pattern : kPatterns) {
      for (int64_t L : {90, 4}) {
        if (!takes(number++, 3)) continue;
        Case c = long_case(dtype, L);
        c.is_causal = L == 90 && pattern.of_keys;
        Workload spans(c);
        c.mask_type = MaskType::boolean;
        Workload mask(c);
        mask.mask.fill([] { return 1; });
        hide(mask, mask.mask, true, pattern), show(spans, pattern);
        for (size_t n = 0; n < spans.inputs().size(); ++n)  // the mask moved the random numbers on
          if (*spans.inputs()[n] && *mask.inputs()[n])
            *spans.inputs()[n] = mask.inputs()[n]->dense(mask.inputs()[n]->type());
        SCOPED_TRACE(::testing::Message() << pattern.name << " " << c);
        expect_identical(run(spans), run(mask));
        expect_truth(spans);
        if (HasFailure()) return;
      }
    }
  }
}

// The second mask hides tiles, beside a first one with a gradient, causal rows and dropout.
TEST_P(HiddenTilesTest, WithOtherOptions) {
  for (const Pattern& pattern : kPatterns) {
    Case c = long_case(DType::f32, 90);
    c.mask_type = c.bias_type = MaskType::f32, c.grad_mask = c.grad_bias = true;
    c.is_causal = true, c.sinks = c.grad_sinks = true, c.dropout_p = 0.3, c.softcap = 2;
    SCOPED_TRACE(pattern.name);
    Workload w(c);
    hide(w, w.bias, false, pattern);
    expect_truth(w);
  }
}

// A tile that is left out gives the same bits as one that is computed: here the first head sees all
// keys, but those that are hidden from the second one have a weight of 0.
TEST_P(HiddenTilesTest, SameBitsAsComputed) {
  for (DType dtype : kDTypes) {
    for (int64_t L : {90, 4}) {
      Case c = long_case(dtype, L);
      c.mask_type = float_masks(dtype).front();
      c.weights = c.grad_weights = c.alibi_slopes = c.grad_alibi_slopes = false;
      Workload hidden(c), computed(c);
      hide(hidden, hidden.mask, false, kPatterns[0]);
      hide(computed, computed.mask, false, kPatterns[0]);
      for (Workload* w : {&hidden, &computed})  // every row sees something
        for (int64_t i = 0; i < 2 * L; ++i) w->mask.set({i / L, i % L, 0}, 0);
      for (int64_t i = 0; i < L; ++i)
        for (int64_t j = 150; j < c.S; ++j) computed.mask.set({0, i, j}, -30000);
      SCOPED_TRACE(::testing::Message() << c);
      const Results actual = run(hidden), expected = run(computed);
      EXPECT_EQ(actual.output, expected.output);
      EXPECT_EQ(actual.lse, expected.lse);
      EXPECT_EQ(actual.grad_query, expected.grad_query);
      EXPECT_EQ(actual.grad_value, expected.grad_value);
    }
  }
}

// What is not finite in hidden keys stays there.
TEST_P(HiddenTilesTest, JunkDoesNotLeak) {
  for (DType dtype : kDTypes) {
    Case c = long_case(dtype, 90);
    c.mask_type = MaskType::boolean;
    Workload clean(c), dirty(c);
    for (Workload* w : {&clean, &dirty}) hide(*w, w->mask, true, kPatterns[2]);
    for (int64_t j = 20; j < 405; ++j) {
      for (int64_t d = 0; d < c.D; ++d) dirty.key.set({0, j, d}, kNaN);
      for (int64_t d = 0; d < c.Dv; ++d) dirty.value.set({0, j, d}, kInf);
    }
    expect_identical(run(dirty), run(clean));
  }
}

}  // namespace
}  // namespace qkv::test
