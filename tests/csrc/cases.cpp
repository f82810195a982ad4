#include "cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference/reference.h"

namespace qkv::test {

const Library kKernels = {attention_forward, attention_backward, attention_hard};
const Library kReference = {reference::attention_forward, reference::attention_backward,
                            reference::attention_hard};

Outputs::Outputs(const Workload& w) : w_(w) {
  const Case& c = w.c;
  const int64_t H = c.heads();
  const Type element = type_of(c.dtype), compute = w.compute_element();
  output_ = w.make_output(element, H, c.L, c.Dv);
  lse_ = w.make_output(compute, H, c.L, 1);
  if (c.grad_query) grad_query_ = w.make_output(element, H, c.L, c.D);
  if (c.grad_key) grad_key_ = w.make_output(element, c.kv_heads, c.S, c.D);
  if (c.grad_value) grad_value_ = w.make_output(element, c.kv_heads, c.S, c.Dv);
  if (c.grad_bias) grad_bias_ = w.make_grad_mask();
  if (c.grad_bias_keys) grad_bias_keys_ = w.make_output(compute, H, 1, c.S);
  if (c.grad_bias_queries) grad_bias_queries_ = w.make_output(compute, H, c.L, 1);
  if (c.grad_mask) grad_mask_ = w.make_grad_mask();
  if (c.grad_mask_keys) grad_mask_keys_ = w.make_output(compute, H, 1, c.S);
  if (c.grad_mask_queries) grad_mask_queries_ = w.make_output(compute, H, c.L, 1);
  if (c.grad_alibi_slopes) grad_alibi_slopes_ = w.make_output(Type::f64, H, 1, 1);
  if (c.grad_sinks) grad_sinks_ = w.make_output(Type::f64, H, 1, 1);
  if (c.weights) weights_ = w.make_weights();
}

ForwardResult Outputs::forward_result(bool want_lse) const {
  return {output_.output(), want_lse ? lse_.output() : Output{}, weights_.output(),
          w_.c.weights_factor};
}

BackwardArgs Outputs::backward_args() const {
  BackwardArgs a;
  a.output = output_.input(), a.lse = lse_.input();
  a.grad_output = w_.grad_output.input(), a.grad_lse = w_.grad_lse.input();
  a.grad_weights = w_.grad_weights.input();
  a.grad_query = grad_query_.output(), a.grad_key = grad_key_.output();
  a.grad_value = grad_value_.output();
  a.grad_masks = {
      GradMask{grad_mask_.output(), grad_mask_keys_.output(), grad_mask_queries_.output()},
      GradMask{grad_bias_.output(), grad_bias_keys_.output(), grad_bias_queries_.output()}};
  a.grad_by_head[kAlibiSlopes] = grad_alibi_slopes_.output(),
  a.grad_by_head[kSinks] = grad_sinks_.output();
  return a;
}

std::vector<const Tensor*> Outputs::all() const {
  return {&output_,
          &lse_,
          &grad_query_,
          &grad_key_,
          &grad_value_,
          &grad_mask_,
          &grad_mask_keys_,
          &grad_mask_queries_,
          &grad_alibi_slopes_,
          &grad_bias_,
          &grad_bias_keys_,
          &grad_bias_queries_,
          &grad_sinks_,
          &weights_};
}

void Outputs::set_output(const std::vector<double>& values) {
  size_t n = 0;
  output_.fill([&] { return values[n++]; });
}

void Outputs::forward_is_done() const {
  for (const Tensor* t : {&output_, &lse_, &weights_}) t->make_read_only();
}

void Outputs::expect_nothing_else_written() const {
  for (const Tensor* t : all())
    EXPECT_TRUE(t->canaries_alive()) << "something beside a result was written";
}

Results Outputs::values() const {
  Results r;
  r.output = output_.values(), r.lse = lse_.values();
  r.grad_query = grad_query_.values(), r.grad_key = grad_key_.values();
  r.grad_value = grad_value_.values();
  r.grad_mask = grad_mask_.values(), r.grad_mask_keys = grad_mask_keys_.values();
  r.grad_mask_queries = grad_mask_queries_.values();
  r.grad_bias = grad_bias_.values(), r.grad_bias_keys = grad_bias_keys_.values();
  r.grad_bias_queries = grad_bias_queries_.values();
  r.grad_alibi_slopes = grad_alibi_slopes_.values(), r.grad_sinks = grad_sinks_.values();
  r.weights = weights_.values();
  return r;
}

namespace {

void make_inputs_read_only(const Workload& w) {
  for (const Tensor* t : w.inputs()) t->make_read_only();
}

}  // namespace

namespace {

Results run_forward(const Workload& w, const Problem& problem, bool lse, const Library& library) {
  const Outputs outputs(w);
  library.forward(problem, outputs.forward_result(lse));
  outputs.expect_nothing_else_written();
  const Results all = outputs.values();
  Results r;
  r.output = all.output;
  if (lse) r.lse = all.lse;
  return r;
}

}  // namespace

Results run_forward(const Workload& w, const Library& library) {
  make_inputs_read_only(w);
  return run_forward(w, w.problem(), w.c.lse, library);
}

Results run_forward(const Workload& w, const Problem& problem) {
  return run_forward(w, problem, /*lse=*/true, kKernels);
}

namespace {

void run_backward(const Workload& w, const Outputs& outputs, const Library& library) {
  outputs.forward_is_done();
  library.backward(w.problem(), outputs.backward_args());
  outputs.expect_nothing_else_written();
}

}  // namespace

Results run(const Workload& w, const Library& library) {
  make_inputs_read_only(w);
  const Outputs outputs(w);
  library.forward(w.problem(), outputs.forward_result(true));
  outputs.expect_nothing_else_written();
  run_backward(w, outputs, library);
  return outputs.values();
}

Results run_hard(const Workload& w, const Library& library) {
  make_inputs_read_only(w);
  const Tensor output = w.make_output(type_of(w.c.dtype), w.c.heads(), w.c.L, w.c.Dv);
  const Tensor index = w.make_output(Type::int64, w.c.heads(), w.c.L, 1);
  library.hard(w.problem(), {output.output(), index.output()});
  EXPECT_TRUE(output.canaries_alive() && index.canaries_alive());
  Results r;
  r.hard_output = output.values(), r.hard_index = index.values();
  return r;
}

Results forward_truth(const Workload& w) { return run_forward(w.in_f64(), kReference); }

Results truth(const Workload& w, const Results& actual) {
  if (!is_half(w.c.dtype) || w.c.grad_alibi_slopes) return run(w.in_f64(), kReference);
  const Workload exact = w.in_f64();
  Outputs outputs(exact);
  kReference.forward(exact.problem(), outputs.forward_result(true));
  const std::vector<double> output = outputs.values().output;
  outputs.set_output(actual.output);
  run_backward(exact, outputs, kReference);
  Results all = outputs.values();
  all.output = output;
  return all;
}

Results expect_truth(const Workload& w) {
  SCOPED_TRACE(::testing::Message() << w.c);
  const Results actual = run(w);
  expect_close(actual, truth(w, actual), w.c);
  return actual;
}

Results expect_forward_truth(const Workload& w) {
  SCOPED_TRACE(::testing::Message() << w.c);
  const Results actual = run_forward(w);
  expect_close(actual, forward_truth(w), w.c);
  return actual;
}

double relative_rms_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (actual[i] - expected[i]) * (actual[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

void expect_same_bits(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    ASSERT_FALSE(std::memcmp(&actual[i], &expected[i], sizeof(double)))
        << "element " << i << " of " << expected.size() << " is " << actual[i] << ", expected "
        << expected[i];
}

void expect_identical(const Results& actual, const Results& expected) {
  for (const NamedResult& r : kResults) {
    SCOPED_TRACE(r.name);
    expect_same_bits(actual.*r.values, expected.*r.values);
  }
}

}  // namespace qkv::test
