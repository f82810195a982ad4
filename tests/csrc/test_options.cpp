// The options of problem.h, one at a time, forward and backward, against the
// f64 reference on every instruction set. Their combinations are drawn in
// test_forward and test_backward.
#include <gtest/gtest.h>

#include "cases.h"

namespace qkv::test {
namespace {

// The case in every dtype, with one query head and with several for a key/value head.
std::vector<Case> variants(Case c) {
  std::vector<Case> all;
  for (DType dtype : kDTypes) {
    c.dtype = dtype, c.group = dtype == DType::f32 || dtype == DType::f16 ? 1 : 3;
    all.push_back(c);
  }
  return all;
}

class OptionsTest : public IsaTest {
 protected:
  void expect_truth(const Case& which) {
    for (const Case& c : variants(which)) test::expect_truth(Workload(c));
  }
};

QKV_FOR_EACH_ISA(OptionsTest);

// Windows that let whole tiles be skipped on either side, for L below, at and above S.
TEST_P(OptionsTest, Windows) {
  const Sizes windows = {-1, 0, 1, 17, 100, int64_t{1} << 40};
  for (const auto& [L, S] : {std::pair<int64_t, int64_t>{150, 150}, {70, 400}, {400, 70}}) {
    for (int64_t left : windows) {
      for (int64_t right : windows) {
        Case c;
        c.L = L, c.S = S, c.D = 3, c.Dv = 2;
        c.window_left = left, c.window_right = right, c.num_threads = 2;
        c.is_causal = (left + right) % 3 == 0;
        const std::vector<Case> all = variants(c);
        for (size_t n = size_t(left + right + 2) % 2; n < all.size(); n += 2)
          test::expect_truth(Workload(all[n]));
        if (HasFailure()) return;
      }
    }
  }
}

// The keys are split, and a row sees no key of some splits.
TEST_P(OptionsTest, WindowsOfADecodeStep) {
  for (int64_t L : {1, 3}) {
    for (int64_t left : {0, 5, 600, 1400}) {
      Case c;
      c.L = L, c.S = 1500, c.D = 8, c.num_threads = 2;
      c.window_left = left, c.window_right = 0;
      c.sinks = c.grad_sinks = left == 5;
      expect_truth(c);
    }
  }
}

// With L > S + left the last rows stand behind every key that they could see, and with S < L -
// right the first rows before every such key.
TEST_P(OptionsTest, WindowsThatShowNothing) {
  for (bool is_causal : {false, true}) {
    Case c;
    c.L = 300, c.S = 20, c.window_left = is_causal ? 3 : -1, c.window_right = is_causal ? -1 : 3;
    c.is_causal = is_causal;
    expect_truth(c);
    for (const Case& each : variants(c)) {
      const Results r = run(Workload(each));
      for (int64_t d = 0; d < c.Dv; ++d) EXPECT_EQ(r.output[d] == 0, !is_causal);
      EXPECT_EQ(r.lse.front() == -kInf, !is_causal);
      EXPECT_EQ(r.grad_query.front() == 0, !is_causal);
    }
  }
  Case c;  // is_causal shows keys up to i, and the window keys from i + 100 on
  c.L = 50, c.S = 150, c.is_causal = true, c.window_left = 0;
  for (const Case& each : variants(c)) {
    const Results r = run(Workload(each));
    for (double x : r.lse) EXPECT_EQ(x, -kInf);
    for (const auto* zero : {&r.output, &r.grad_query, &r.grad_key, &r.grad_value})
      for (double x : *zero) ASSERT_EQ(x, 0);
  }
}

TEST_P(OptionsTest, Softcap) {
  for (double softcap : {0.5, 5.0, 50.0, 1e6}) {
    for (double scale : {0.01, 1.0, 30.0}) {
      Case c;
      c.L = 40, c.S = 70, c.softcap = softcap, c.scale = scale;
      expect_truth(c);
    }
  }
}

TEST_P(OptionsTest, AlibiSlopes) {
  for (const auto& [L, S] :
       {std::pair<int64_t, int64_t>{70, 70}, {40, 160}, {160, 40}, {1, 1500}}) {
    Case c;
    c.batch = {2}, c.kv_heads = 2, c.L = L, c.S = S, c.num_threads = 2;
    c.alibi_slopes = c.grad_alibi_slopes = true;
    expect_truth(c);
    c.grad_query = c.grad_key = c.grad_value = false;  // only the gradient of slopes is wanted
    expect_truth(c);
  }
}

TEST_P(OptionsTest, Sinks) {
  for (const auto& [L, S] : {std::pair<int64_t, int64_t>{70, 70}, {3, 1500}, {40, 0}}) {
    for (MaskType mask : {MaskType::none, MaskType::boolean}) {
      Case c;
      c.batch = {2}, c.kv_heads = 2, c.L = L, c.S = S, c.mask_type = mask, c.num_threads = 2;
      c.sinks = c.grad_sinks = true;
      expect_truth(c);
      c.grad_query = c.grad_key = c.grad_value = false;
      expect_truth(c);
    }
  }
}

// Rows that see nothing but the sink have exact gradients, however large that of their lse is.
TEST_P(OptionsTest, RowsThatSeeTheSinkAlone) {
  for (DType dtype : kDTypes) {
    for (int64_t group : {1, 3}) {
      Case c;
      c.dtype = dtype, c.group = group, c.L = 90, c.S = 70, c.window_right = 0;
      c.sinks = c.grad_sinks = c.alibi_slopes = c.grad_alibi_slopes = true;
      c.mask_type = MaskType::f32, c.grad_mask_queries = true;
      const Workload w(c);
      const Results r = test::expect_truth(w);
      for (int64_t h = 0; h < group; ++h) {
        for (int64_t i = 0; i < 20; ++i) {  // these rows stand before every key
          EXPECT_EQ(r.output[(h * c.L + i) * c.Dv], 0);
          EXPECT_EQ(r.grad_query[(h * c.L + i) * c.D], 0);
          EXPECT_EQ(r.grad_mask_queries[h * c.L + i], 0);
        }
      }
    }
  }
}

// A sink of -inf is no sink; +inf and NaN give what a softmax over scores and sink makes of them.
TEST_P(OptionsTest, SinksOfAnySize) {
  for (double sink : {-kInf, -1e5, -80.0, 80.0, 1e5, kInf, kNaN}) {
    for (int64_t S : {5, 1500}) {
      Case c;
      c.L = 3, c.S = S, c.sinks = c.grad_sinks = true;
      c.mask_type = MaskType::boolean;
      for (Case each : variants(c)) {
        Workload w(each);
        w.sinks.fill([&] { return sink; });
        for (int64_t j = 0; j < S; ++j) w.mask.set({0, 1, j}, 0);  // row 1 sees only the sink
        test::expect_truth(w);
      }
    }
  }
}

// A row that sees no key has output 0 and gradients 0, and as lse its sink, even one that spoils
// the rows that see any.
TEST_P(OptionsTest, NothingButASinkThatIsNotFinite) {
  for (double sink : {kInf, kNaN}) {
    for (const auto& [L, S] : {std::pair<int64_t, int64_t>{40, 5}, {3, 5}, {40, 300}, {2, 3000}}) {
      Case c;
      c.L = L, c.S = S, c.sinks = c.grad_sinks = true, c.mask_type = MaskType::boolean;
      c.weights = L == 40;
      for (Case each : variants(c)) {
        for (bool only_blind : {false, true}) {
          Workload w(each);
          w.sinks.fill([&] { return sink; });
          const auto is_blind = [&](int64_t i) { return i == 1 || only_blind; };
          for (int64_t h = 0; h < each.heads(); ++h)
            for (int64_t i = 0; i < L; ++i)
              for (int64_t j = 0; j < S; ++j) w.mask.set({h, i, j}, !is_blind(i));
          SCOPED_TRACE(::testing::Message() << sink << " blind " << only_blind << " " << each);
          const Results r = test::expect_truth(w);
          for (int64_t h = 0; h < each.heads(); ++h) {
            for (int64_t i = 0; i < L; ++i) {
              const size_t row = size_t(h * L + i);
              EXPECT_EQ(std::isnan(r.output[row * each.Dv]), !is_blind(i));
              EXPECT_EQ(r.output[row * each.Dv] == 0, is_blind(i));
              EXPECT_EQ(r.grad_query[row * each.D] == 0, is_blind(i));
              EXPECT_EQ(r.lse[row] == kInf, is_blind(i) && sink == kInf);
              EXPECT_FALSE(std::isfinite(r.lse[row]));
            }
            EXPECT_EQ(std::isnan(r.grad_sinks[h]), !only_blind);
          }
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(OptionsTest, Dropout) {
  for (double p : {1e-3, 0.1, 0.5, 0.99, 1.0}) {
    for (const auto& [L, S] : {std::pair<int64_t, int64_t>{40, 90}, {2, 1500}}) {
      Case c;
      c.kv_heads = 2, c.L = L, c.S = S, c.num_threads = 2;
      c.dropout_p = p;
      expect_truth(c);
    }
  }
}

// Gradients of masks that broadcast over every set of dimensions. The sum over batch and heads is
// made in place, and the sum over rows or columns is a vector for each head.
TEST_P(OptionsTest, GradMask) {
  for (int type : {0, 1}) {
    for (int bits = 0; bits < 16; bits += kQuick ? 3 : 1) {
      Case c;
      c.batch = {2}, c.kv_heads = 2, c.L = 30, c.S = 70, c.D = 4, c.Dv = 3;
      c.num_threads = 2;
      c.share_batch = bits & 1, c.share_heads = bits & 2, c.is_causal = bits & 4;
      c.strided = bits & 8;
      c.grad_mask = true;
      c.grad_mask_keys = bits & 1, c.grad_mask_queries = bits & 2;
      c.grad_query = c.grad_key = c.grad_value = bits >= 4 || type == 0;
      for (Case each : variants(c)) {
        each.mask_type = type ? float_masks(each.dtype).back() : MaskType::f32;
        test::expect_truth(Workload(each));
      }
    }
  }
}

// Only grad_mask_keys and grad_mask_queries, which are the gradients of key padding and of biases
// for each query.
TEST_P(OptionsTest, GradMaskOfRowsAndColumns) {
  for (const auto& [L, S] : {std::pair<int64_t, int64_t>{70, 90}, {1, 700}, {300, 1}, {0, 5}}) {
    for (bool keys : {false, true}) {
      Case c;
      c.kv_heads = 2, c.L = L, c.S = S, c.mask_type = MaskType::f32, c.num_threads = 2;
      c.grad_mask_keys = keys, c.grad_mask_queries = !keys;
      expect_truth(c);
      c.grad_query = c.grad_key = c.grad_value = false;
      expect_truth(c);
    }
  }
}

// grad_mask is one sum over more planes than there are threads, and keys are split.
TEST_P(OptionsTest, GradMaskSharedByAll) {
  Case c;
  c.batch = {3}, c.kv_heads = 2, c.L = 30, c.S = 600, c.D = 4, c.Dv = 4, c.num_threads = 3;
  c.mask_type = MaskType::f32, c.grad_mask = c.weights = c.share_batch = c.share_heads = true;
  expect_truth(c);
}

TEST_P(OptionsTest, Weights) {
  for (const auto& [L, S] : {std::pair<int64_t, int64_t>{70, 90}, {1, 1500}, {33, 3}}) {
    for (int bits = 0; bits < 8; ++bits) {
      Case c;
      c.kv_heads = 2, c.L = L, c.S = S, c.num_threads = 2;
      c.grad_output = c.grad_lse = c.grad_query = c.grad_key = c.grad_value = false;
      c.weights = true, c.share_heads = bits & 1, c.is_causal = bits & 2;
      c.dropout_p = bits & 4 ? 0.3 : 0;
      expect_truth(c);
    }
  }
}

TEST_P(OptionsTest, GradWeights) {
  for (const auto& [L, S] : {std::pair<int64_t, int64_t>{70, 90}, {1, 1500}, {33, 3}, {40, 0}}) {
    for (int bits = 0; bits < 8; ++bits) {
      Case c;
      c.kv_heads = 2, c.L = L, c.S = S, c.num_threads = 2;
      c.grad_weights = true, c.grad_output = bits & 1, c.is_causal = bits & 2;
      c.dropout_p = bits & 4 ? 0.3 : 0;
      expect_truth(c);
    }
  }
}

// Values have no elements: the passes for weights alone have none.
TEST_P(OptionsTest, WithoutValues) {
  Case c;
  c.L = 40, c.S = 70, c.Dv = 0;
  c.weights = c.grad_weights = true, c.grad_output = false;
  expect_truth(c);
}

}  // namespace
}  // namespace qkv::test
