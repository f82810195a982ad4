// Attention problems to run: a Case says which, a Workload holds its inputs,
// run() computes, expect_close() compares.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "attention.h"
#include "reference/reference.h"
#include "tensors.h"

namespace qkv::test {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Case {
  DType dtype = DType::f32;
  Sizes batch = {};
  int64_t kv_heads = 1, group = 1;  // H = kv_heads * group
  int64_t L = 4, S = 4, D = 8, Dv = 8;
  bool is_causal = false;
  MaskType mask_type = MaskType::none;
  Sizes mask_strides = {};  // empty: like the other inputs
  double scale = kNaN;      // NaN: 1 / sqrt(D)
  int64_t key_head_repeat = 1, value_head_repeat = 1;
  bool lse = true;                                             // wanted from run_forward
  bool grad_output = true, grad_lse = true;                    // given
  bool grad_query = true, grad_key = true, grad_value = true;  // wanted
  bool strided = false;   // any strides, zero ones included; else dense
  bool at_front = false;  // see GuardedMemory
  int num_threads = 1;
  uint64_t seed = 1;

  double effective_scale() const { return std::isnan(scale) ? 1 / std::sqrt(double(D)) : scale; }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << (c.dtype == DType::f32 ? "f32" : "f64") << " batch [";
  for (int64_t b : c.batch) out << b << " ";
  return out << "] kv_heads " << c.kv_heads << " group " << c.group << " L " << c.L << " S " << c.S
             << " D " << c.D << " Dv " << c.Dv << " causal " << c.is_causal << " mask "
             << int(c.mask_type) << " scale " << c.effective_scale() << " head_repeat "
             << c.key_head_repeat << "," << c.value_head_repeat << " given grad_output,lse "
             << c.grad_output << c.grad_lse << " wanted q,k,v " << c.grad_query << c.grad_key
             << c.grad_value << " strided " << c.strided << " at_front " << c.at_front
             << " threads " << c.num_threads << " seed " << c.seed;
}

// The inputs of a Case: standard normal numbers; masks let about 4 of 5 keys
// through, and now and then none at all.
struct Workload {
  Case c;
  Tensor query, key, value, mask, grad_output, grad_lse;

  explicit Workload(const Case& which) : c(which) {
    Random random(c.seed);
    query = input(random, c.dtype, heads(), c.L, c.D);
    key = input(random, c.dtype, c.kv_heads / c.key_head_repeat, c.S, c.D);
    value = input(random, c.dtype, c.kv_heads / c.value_head_repeat, c.S, c.Dv);
    if (c.grad_output) grad_output = input(random, c.dtype, heads(), c.L, c.Dv);
    if (c.grad_lse) grad_lse = input(random, c.dtype, heads(), c.L, 1);
    if (c.mask_type != MaskType::none) mask = make_mask(random);
  }

  int64_t heads() const { return c.kv_heads * c.group; }

  Sizes sizes(int64_t heads, int64_t rows, int64_t cols) const {
    Sizes s = c.batch;
    s.insert(s.end(), {heads, rows, cols});
    return s;
  }

  // An uninitialised output, with gaps between its elements if the case is strided.
  Tensor make_output(int64_t heads, int64_t rows, int64_t cols) const {
    const Sizes s = sizes(heads, rows, cols);
    Random random(c.seed + 1);
    return {type_of(c.dtype), s, c.strided ? random_strides(random, s, false) : dense_strides(s),
            c.at_front};
  }

  Problem problem() const {
    Problem p;
    p.dtype = c.dtype;
    p.batch_rank = int(c.batch.size());
    std::copy(c.batch.begin(), c.batch.end(), p.batch_sizes.begin());
    p.heads = heads(), p.kv_heads = c.kv_heads;
    p.seqlen_q = c.L, p.seqlen_k = c.S, p.head_dim = c.D, p.head_dim_v = c.Dv;
    p.scale = c.effective_scale();
    p.is_causal = c.is_causal;
    p.query = query.input(), p.key = key.input(), p.value = value.input();
    p.key.strides.head_repeat = c.key_head_repeat;
    p.value.strides.head_repeat = c.value_head_repeat;
    p.mask_type = c.mask_type, p.mask = mask.input();
    p.num_threads = c.num_threads;
    return p;
  }

  // The same numbers in f64, for the reference.
  Workload in_f64() const {
    Workload copy;
    copy.c = c;
    copy.c.dtype = DType::f64;
    copy.c.strided = copy.c.at_front = false;
    copy.query = query.dense(Type::f64), copy.key = key.dense(Type::f64);
    copy.value = value.dense(Type::f64);
    copy.mask = mask.dense(mask_element());
    copy.grad_output = grad_output.dense(Type::f64), copy.grad_lse = grad_lse.dense(Type::f64);
    return copy;
  }

 private:
  Workload() = default;

  Tensor input(Random& random, DType dtype, int64_t heads, int64_t rows, int64_t cols) const {
    const Sizes s = sizes(heads, rows, cols);
    Tensor t(type_of(dtype), s, c.strided ? random_strides(random, s, true) : dense_strides(s),
             c.at_front);
    std::normal_distribution<double> normal;
    t.fill([&] { return normal(random); });
    return t;
  }

  Type mask_element() const {
    return c.mask_type == MaskType::boolean ? Type::byte
           : c.mask_type == MaskType::f32   ? Type::f32
                                            : Type::f64;
  }

  Tensor make_mask(Random& random) const {
    const Sizes s = sizes(heads(), c.L, c.S);
    Tensor t(mask_element(), s,
             !c.mask_strides.empty() ? c.mask_strides
             : c.strided             ? random_strides(random, s, true)
                                     : dense_strides(s),
             c.at_front);
    std::normal_distribution<double> normal;
    const bool is_bool = c.mask_type == MaskType::boolean;
    int64_t column = 0;
    bool row_masked = false;
    t.fill([&]() -> double {
      if (column++ % c.S == 0) row_masked = draw(random, 0, 15) == 0;
      const bool masked = row_masked || draw(random, 0, 4) == 0;
      if (is_bool) return masked ? 0 : draw(random, 1, 255);
      return masked ? -kInf : normal(random);
    });
    return t;
  }
};

// Every element, row-major; empty where not wanted.
struct Results {
  std::vector<double> output, lse, grad_query, grad_key, grad_value;
};

using Forward = void (*)(const Problem&, const ForwardResult&);
using Backward = void (*)(const Problem&, const BackwardArgs&);

// Forward alone, or both passes. The inputs are read-only meanwhile; the test
// fails if anything but the outputs' own elements is written.
Results run_forward(const Workload& w, Forward forward = attention_forward);
Results run(const Workload& w, Forward forward = attention_forward,
            Backward backward = attention_backward);

// What they should give: the reference, all in f64.
Results forward_truth(const Workload& w);
Results truth(const Workload& w);

// A case of any sizes, strides, masks and heads, cheap enough for the reference.
Case random_case(uint64_t seed);

void expect_close(const Results& actual, const Results& expected, const Case& c);
// Root mean square of the difference over that of `expected`.
double relative_rms_error(const std::vector<double>& actual, const std::vector<double>& expected);

void expect_identical(const Results& actual, const Results& expected);

// Each supported instruction set in turn.
class IsaTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { set_isa(GetParam()); }
  void TearDown() override { set_isa(supported_isas().front()); }
};

#define QKV_FOR_EACH_ISA(suite)                                               \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(supported_isas()), \
                           [](const auto& info) { return std::string(info.param); })

}  // namespace qkv::test
