#include "cases.h"

#include <algorithm>
#include <cmath>

namespace qkv::test {
namespace {

double largest(const std::vector<double>& x) {
  double max = 0;
  for (double v : x)
    if (std::isfinite(v)) max = std::max(max, std::abs(v));
  return max;
}

bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return (std::isfinite(a) && std::isfinite(b)) || a == b;
}

void expect_close(const char* name, const std::vector<double>& actual,
                  const std::vector<double>& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  int64_t wrong = 0, first = 0;
  for (int64_t i = int64_t(actual.size()) - 1; i >= 0; --i) {
    const bool ok =
        same_kind(actual[i], expected[i]) && !(std::abs(actual[i] - expected[i]) > tolerance);
    if (!ok) ++wrong, first = i;
  }
  if (wrong)
    ADD_FAILURE() << name << ": " << wrong << " of " << actual.size() << " are off, first ["
                  << first << "]: " << actual[first] << ", expected " << expected[first] << " +- "
                  << tolerance;
}

bool identical(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || !std::memcmp(a.data(), b.data(), a.size() * sizeof(double)));
}

struct ForwardOutputs {
  Tensor output, lse;
};

ForwardOutputs forward_outputs(const Workload& w, bool want_lse, Forward forward) {
  for (const Tensor* t : {&w.query, &w.key, &w.value, &w.mask, &w.grad_output, &w.grad_lse})
    t->make_read_only();
  ForwardOutputs f{w.make_output(w.heads(), w.c.L, w.c.Dv), {}};
  if (want_lse) f.lse = w.make_output(w.heads(), w.c.L, 1);
  forward(w.problem(), {f.output.output(), f.lse.output()});
  for (const Tensor* t : {&f.output, &f.lse}) {
    EXPECT_TRUE(t->canaries_alive()) << "something beside output or lse was written";
    t->make_read_only();
  }
  return f;
}

int64_t draw_from(Random& random, const Sizes& choices) {
  return choices[draw(random, 0, int64_t(choices.size()) - 1)];
}

// One of `usual`, or anything up to `most`.
int64_t draw_size(Random& random, const Sizes& usual, int64_t most) {
  return draw(random, 0, 1) ? draw(random, 1, most) : draw_from(random, usual);
}

}  // namespace

Results run_forward(const Workload& w, Forward forward) {
  const ForwardOutputs f = forward_outputs(w, w.c.lse, forward);
  return {f.output.values(), f.lse.values(), {}, {}, {}};
}

Results run(const Workload& w, Forward forward, Backward backward) {
  const Case& c = w.c;
  const ForwardOutputs f = forward_outputs(w, true, forward);
  Tensor grad_query, grad_key, grad_value;
  if (c.grad_query) grad_query = w.make_output(w.heads(), c.L, c.D);
  if (c.grad_key) grad_key = w.make_output(c.kv_heads, c.S, c.D);
  if (c.grad_value) grad_value = w.make_output(c.kv_heads, c.S, c.Dv);
  BackwardArgs a;
  a.output = f.output.input(), a.lse = f.lse.input();
  a.grad_output = w.grad_output.input(), a.grad_lse = w.grad_lse.input();
  a.grad_query = grad_query.output(), a.grad_key = grad_key.output();
  a.grad_value = grad_value.output();
  backward(w.problem(), a);
  for (const Tensor* t : {&grad_query, &grad_key, &grad_value})
    EXPECT_TRUE(t->canaries_alive()) << "something beside a gradient was written";
  return {f.output.values(), f.lse.values(), grad_query.values(), grad_key.values(),
          grad_value.values()};
}

Results forward_truth(const Workload& w) {
  return run_forward(w.in_f64(), reference::attention_forward);
}

Results truth(const Workload& w) {
  return run(w.in_f64(), reference::attention_forward, reference::attention_backward);
}

Case random_case(uint64_t seed) {
  Random random(seed);
  const int64_t most_work = (kQuick ? 1 : 4) << 18;
  for (;;) {
    Case c;
    c.seed = seed;
    c.dtype = draw(random, 0, 2) ? DType::f32 : DType::f64;
    c.batch.resize(draw(random, 0, 3));
    for (int64_t& b : c.batch) b = draw(random, 0, 9) ? draw(random, 1, 3) : 0;
    c.kv_heads = draw(random, 1, 3);
    c.group = draw_from(random, {1, 1, 2, 3, 8});
    const Sizes lengths = {0, 1, 1, 2, 4, 8, 15, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 513};
    const Sizes dims = {1, 2, 8, 15, 16, 17, 32, 33, 40, 64, 65, 80, 128, 256, 257};
    c.L = draw_size(random, lengths, 300);
    c.S = draw_size(random, lengths, c.L < 4 ? 3000 : 300);
    c.D = draw_size(random, dims, 300);
    c.Dv = draw(random, 0, 1) ? c.D : draw_size(random, dims, 300);
    c.is_causal = draw(random, 0, 1);
    c.mask_type = MaskType(draw(random, 0, 3));
    if (draw(random, 0, 3) == 0) c.scale = std::normal_distribution<double>()(random);
    if (draw(random, 0, 3) == 0) c.key_head_repeat = c.kv_heads;
    if (draw(random, 0, 3) == 0) c.value_head_repeat = c.kv_heads;
    c.lse = draw(random, 0, 3);
    c.grad_output = draw(random, 0, 7);
    c.grad_lse = draw(random, 0, 1);
    c.grad_query = draw(random, 0, 3);
    c.grad_key = draw(random, 0, 3);
    c.grad_value = draw(random, 0, 3);
    c.strided = draw(random, 0, 1);
    c.at_front = draw(random, 0, 1);
    c.num_threads = int(draw(random, 1, 3));
    int64_t work = c.kv_heads * c.group * c.L * c.S * (c.D + c.Dv);
    for (int64_t b : c.batch) work *= b;
    if (work <= most_work) return c;
  }
}

// Inputs are standard normal: a sum of n products of them is about sqrt(n), and
// adding it up costs about n roundings of that last digit; more where strides of
// 0 repeat one number. So a score errs by `score` below, a weight by as much,
// relative to itself; the gradient of a score is a difference and errs by what
// its two sides do. Six times these are allowed, and the f64 reference has its
// share of it; a key of a thousand left out is off by thousands of roundings.
void expect_close(const Results& actual, const Results& expected, const Case& c) {
  const double eps = c.dtype == DType::f32 ? std::numeric_limits<float>::epsilon()
                                           : std::numeric_limits<double>::epsilon();
  const auto size = [&](double n) { return c.strided ? n : std::sqrt(n); };
  const auto error = [&](double n) { return eps * (4 + std::sqrt(n) * size(n)); };
  const double scale = std::abs(c.effective_scale()), rows = size(double(c.L * c.group));
  const double score = 4 * eps + scale * error(double(c.D));
  // Backward, weights are exp(score - lse), and lse is a number of the dtype.
  const double weight = score + eps * largest(expected.lse);
  const double grad_score = scale * (weight * (1 + size(double(c.Dv))) + error(double(c.Dv)));
  expect_close("output", actual.output, expected.output, 6 * score);
  expect_close("lse", actual.lse, expected.lse, 6 * score + eps * largest(expected.lse));
  expect_close("grad_query", actual.grad_query, expected.grad_query, 6 * grad_score);
  expect_close("grad_key", actual.grad_key, expected.grad_key, 6 * grad_score * rows);
  expect_close("grad_value", actual.grad_value, expected.grad_value, 6 * weight * rows);
}

double relative_rms_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

void expect_identical(const Results& actual, const Results& expected) {
  EXPECT_TRUE(identical(actual.output, expected.output)) << "output";
  EXPECT_TRUE(identical(actual.lse, expected.lse)) << "lse";
  EXPECT_TRUE(identical(actual.grad_query, expected.grad_query)) << "grad_query";
  EXPECT_TRUE(identical(actual.grad_key, expected.grad_key)) << "grad_key";
  EXPECT_TRUE(identical(actual.grad_value, expected.grad_value)) << "grad_value";
}

}  // namespace qkv::test
