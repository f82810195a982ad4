// How far results may be from the reference.
#include <algorithm>
#include <cmath>
#include <string>

#include "cases.h"
#include "common/philox.h"
#include "expect_near.h"

namespace qkv::test {
namespace {

// Whether both numbers are finite, both NaN, or the same infinity. With `zeros`, NaN may stand for
// an infinity: dropout multiplies infinities by 0, sooner or later, and so does the derivative of a
// tanh that is rounded to 1.
bool same_kind(double actual, double expected, bool zeros) {
  if (std::isfinite(expected)) return std::isfinite(actual);
  if (std::isnan(expected)) return std::isnan(actual);
  return actual == expected || (zeros && std::isnan(actual));
}

// Whether `actual` is within `tolerance` of `expected`, and the rounding to `stored`, the type in
// which results are stored. f16 may be rounded to infinity.
bool is_close(double actual, double expected, double tolerance, DType stored, bool zeros) {
  if (stored == DType::f16 && std::abs(expected) + tolerance >= 65520 && std::isinf(actual))
    return std::signbit(actual) == std::signbit(expected);
  if (!same_kind(actual, expected, zeros)) return false;
  tolerance += rounding(stored, std::abs(expected) + tolerance);
  return !(std::abs(actual - expected) > tolerance);
}

void expect_close(const char* name, const std::vector<double>& actual,
                  const std::vector<double>& expected, double tolerance, DType stored, bool zeros) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  int64_t wrong = 0, first = 0;
  for (int64_t i = int64_t(actual.size()) - 1; i >= 0; --i)
    if (!is_close(actual[i], expected[i], tolerance, stored, zeros)) ++wrong, first = i;
  if (wrong)
    ADD_FAILURE() << name << ": " << wrong << " of " << actual.size() << " are off, first ["
                  << first << "]: " << actual[first] << ", expected " << expected[first] << " +- "
                  << tolerance << (is_half(stored) ? " and the rounding of a half" : "");
}

// How many elements of [B, H, L, S] are added up in one element of grad_mask or weights.
double sharers(const Case& c) {
  double n = c.share_heads ? double(c.heads()) : 1;
  if (c.share_batch)
    for (int64_t b : c.batch) n *= double(b);
  return n;
}

// How far a query or a weight may be from the word that int8 is multiplied by in half precision,
// relative to the largest one of its row.
double word_rounding(const Case& c) { return c.int8 && is_half(c.dtype) ? 0x1p-15 : 0; }

// The relative error of the factors of a product. Where instructions take both factors in bf16,
// weights and the gradients of scores are rounded to it before they are multiplied.
double factor_rounding(DType dtype) {
  return dtype == DType::bf16 && multiplies_pairs(active_isa()) ? 0x1p-9 : 0;
}

}  // namespace

// Rounding to p digits errs by up to half a unit in the last place, and by 0.21 * 2^(1 - p)
// relative to normal numbers. Rounding the factors of a sum costs about as much again.
double rms_of_rounding(DType half) {
  return 0.22 * (half == DType::bf16 ? 0x1p-7 : 0x1p-10) + factor_rounding(half) / 2;
}

// Inputs are standard normal: a sum of n products of them is about sqrt(n), and adding it up costs
// about n roundings of the last digit of sqrt(n); more where strides of 0 repeat one number. So a
// score errs by `score` below, and a weight by as much, relative to itself. The gradient of a score
// is a difference, and errs by as much as its two sides do. Six times these errors are allowed, of
// which the f64 reference has its share; a result with one key of a thousand left out is off by
// thousands of roundings. Half precision is computed in f32, so that only its last rounding is
// added.
void expect_close(const Results& actual, const Results& expected, const Case& c) {
  const double eps = c.dtype == DType::f64 ? std::numeric_limits<double>::epsilon()
                                           : double(std::numeric_limits<float>::epsilon());
  const auto size = [&](double n) { return c.strided ? n : std::sqrt(n); };
  const auto error = [&](double n) { return eps * (4 + std::sqrt(n) * size(n)); };
  const double L = double(c.L), rows = size(L * double(c.group)), dim_v = double(c.Dv);
  const double scale = std::abs(c.effective_scale());
  double score = 4 * eps + scale * (error(double(c.D)) + word_rounding(c) * size(double(c.D)));
  // tanh errs by a few roundings of the capped score, and ALiBi, with slopes of up to 1/4, by one
  // rounding of slope times distance.
  if (c.softcap > 0) score += 4 * eps * std::min(c.softcap, 4 * scale * size(double(c.D)));
  if (c.alibi_slopes) score += eps / 4 * (L + double(c.S));
  // In the backward pass weights are exp(score - lse), and lse is rounded to the compute type.
  const double weight = score + eps * largest_finite(expected.lse);
  const double keep = c.dropout_p > 0 ? std::max(1., dropout_scale(c.dropout_p)) : 1;
  const double factor = c.int8 ? word_rounding(c) : factor_rounding(c.dtype);
  // The error of the gradient of one score, before the scale, if weights err by `weight`.
  const auto grad_error = [&](double weight) {
    return keep * (weight * (1 + size(dim_v) + (c.grad_weights ? 2 : 0)) + error(dim_v));
  };
  const double grad = grad_error(weight), grad_factor = grad_error(weight + factor);
  // The error of adding up all that share an element, in the type that the sum has.
  const double shared = std::sqrt(sharers(c)) * size(sharers(c));
  const auto sum = [&](const std::vector<double>& all) {
    return eps * shared * (1 + largest_finite(all));
  };
  const double tolerances[] = {
      6 * keep * (score + factor),                         // output
      6 * score + eps * largest_finite(expected.lse),      // lse
      6 * scale * grad_factor,                             // grad_query
      6 * scale * grad_factor * rows,                      // grad_key
      6 * keep * (weight + factor) * rows,                 // grad_value
      6 * grad * shared + sum(expected.grad_mask),         // grad_mask
      6 * grad * size(L),                                  // grad_mask_keys
      6 * grad,                                            // grad_mask_queries
      6 * grad * shared + sum(expected.grad_bias),         // grad_bias
      6 * grad * size(L),                                  // grad_bias_keys
      6 * grad,                                            // grad_bias_queries
      6 * grad * size(L) * (L + double(c.S)),              // grad_alibi_slopes
      6 * grad * size(L),                                  // grad_sinks
      6 * keep * weight * shared + sum(expected.weights),  // weights
      0,                                                   // hard_output
      0,                                                   // hard_index
  };
  static_assert(std::size(tolerances) == std::size(kResults));
  for (size_t r = 0; r < std::size(kResults); ++r) {
    const NamedResult& result = kResults[r];
    expect_close(result.name, actual.*result.values, expected.*result.values, tolerances[r],
                 result.in_dtype ? c.dtype : compute_type(c.dtype),
                 c.dropout_p > 0 || c.softcap > 0);
  }
}

}  // namespace qkv::test
