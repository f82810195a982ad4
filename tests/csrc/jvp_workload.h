// The inputs of a Case with a direction for each of them, and what attention_jvp makes of them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "attention_jvp.h"
#include "cases.h"
#include "reference/reference.h"

namespace qkv::test {

// Which directions a test gives; all others are absent. Those of tensors that a case lacks are
// absent in any case.
enum Along {
  kAlongQuery = 1,
  kAlongKey = 2,
  kAlongValue = 4,
  kAlongMask = 8,
  kAlongBias = 16,
  kAlongSlopes = 32,
  kAlongSinks = 64,
  kAlongAll = 127
};

struct JvpResults {
  std::vector<double> output, lse, output_jvp, lse_jvp;
};

inline void expect_same_bits(const JvpResults& a, const JvpResults& b) {
  for (auto member :
       {&JvpResults::output, &JvpResults::lse, &JvpResults::output_jvp, &JvpResults::lse_jvp})
    expect_same_bits(a.*member, b.*member);
}

struct JvpWorkload : Workload {
  // Directions, of the shapes of the tensors they belong to.
  Tensor query_jvp, key_jvp, value_jvp, mask_jvp, bias_jvp, slopes_jvp, sinks_jvp;
  Tensor given_output;  // JvpArgs::output

  explicit JvpWorkload(const Case& which, int along = kAlongAll) : Workload(which) {
    Random random(c.seed + 77);
    const auto direction = [&](Along bit, const Tensor& of, Type type, double size = 1) {
      if (!of || !(along & bit)) return Tensor();
      const Sizes s = of.sizes();
      Tensor t(type, s, c.strided ? random_strides(random, s, true) : dense_strides(s), c.at_front);
      t.fill([&] { return size * draw_normal(random); });
      return t;
    };
    const Type element = type_of(c.dtype);
    query_jvp = direction(kAlongQuery, query, element);
    key_jvp = direction(kAlongKey, key, element);
    value_jvp = direction(kAlongValue, value, element);
    if (c.float_mask()) mask_jvp = direction(kAlongMask, mask, type_of(c.mask_type));
    bias_jvp = direction(kAlongBias, bias, type_of(c.bias_type));
    slopes_jvp = direction(kAlongSlopes, alibi_slopes, Type::f64, 1. / 16);
    sinks_jvp = direction(kAlongSinks, sinks, Type::f64);
  }

  // The tensors of Workload::inputs() that have directions, and those directions in their order.
  std::vector<Tensor*> moved() {
    return {&query, &key, &value, &mask, &bias, &alibi_slopes, &sinks};
  }
  std::vector<Tensor*> directions() {
    return {&query_jvp, &key_jvp, &value_jvp, &mask_jvp, &bias_jvp, &slopes_jvp, &sinks_jvp};
  }

  JvpArgs args() const {
    JvpArgs a;
    a.query = query_jvp.input(), a.key = key_jvp.input(), a.value = value_jvp.input();
    a.key.strides.head_repeat = c.key_head_repeat;
    a.value.strides.head_repeat = c.value_head_repeat;
    if (mask_jvp) a.masks[0] = {c.mask_type, mask_jvp.input()};
    if (bias_jvp) a.masks[1] = {c.bias_type, bias_jvp.input()};
    a.by_head[kAlibiSlopes] = slopes_jvp.input(), a.by_head[kSinks] = sinks_jvp.input();
    a.output = given_output.input();
    return a;
  }

  // A copy with the same numbers in f64, for the reference.
  JvpWorkload in_f64() const {
    JvpWorkload copy(Workload::in_f64());
    JvpWorkload& from = const_cast<JvpWorkload&>(*this);
    for (size_t n = 0; n < from.directions().size(); ++n)
      *copy.directions()[n] = from.directions()[n]->dense(Type::f64);
    return copy;
  }

 private:
  explicit JvpWorkload(Workload&& w) : Workload(std::move(w)) {}
};

using Jvp = void (*)(const Problem&, const JvpArgs&, const JvpResult&);

// Runs attention_jvp. Inputs are read-only meanwhile, and the test fails if anything but elements
// of the results is written.
inline JvpResults run_jvp(const JvpWorkload& w, Jvp function = attention_jvp) {
  JvpWorkload& inputs = const_cast<JvpWorkload&>(w);
  for (const Tensor* t : inputs.inputs()) t->make_read_only();
  for (const Tensor* t : inputs.directions()) t->make_read_only();
  const Type element = type_of(w.c.dtype), compute = w.compute_element();
  Tensor output = w.given_output ? Tensor() : w.make_output(element, w.c.heads(), w.c.L, w.c.Dv);
  Tensor lse = w.make_output(compute, w.c.heads(), w.c.L, 1);
  Tensor output_jvp = w.make_output(element, w.c.heads(), w.c.L, w.c.Dv);
  Tensor lse_jvp = w.make_output(compute, w.c.heads(), w.c.L, 1);
  function(w.problem(), w.args(),
           {output.output(), lse.output(), output_jvp.output(), lse_jvp.output()});
  for (const Tensor* t : {&output, &lse, &output_jvp, &lse_jvp})
    EXPECT_TRUE(t->canaries_alive()) << "something beside a result was written";
  return {output.values(), lse.values(), output_jvp.values(), lse_jvp.values()};
}

// A copy in f64 in which every tensor has moved by h along its direction.
inline JvpWorkload moved_by(double h, const JvpWorkload& of) {
  JvpWorkload w = of.in_f64();
  for (size_t n = 0; n < w.moved().size(); ++n) {
    Tensor &x = *w.moved()[n], &direction = *w.directions()[n];
    if (!direction) continue;
    const std::vector<double> along = direction.values();
    size_t at = 0;
    x.for_each([&](int64_t offset) { x.set(offset, x.get(offset) + h * along[at++]); });
  }
  return w;
}

// Small cases with each option, for finite differences (test_reference_jvp.cpp).
std::vector<Case> derivative_cases();

inline JvpResults jvp_truth(const JvpWorkload& w) {
  return run_jvp(w.in_f64(), reference::attention_jvp);
}

}  // namespace qkv::test
