// The steps of attention and of its derivatives, each one of torch's operators: what the
// compositions are made of (composition.h). The letters are those of docs/derivatives.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymFloat.h>

#include "call/call.h"

namespace qkv::ops {

// All are in the compute type; [..., H, L, S] where no shape is given.
struct Steps {
  // Each has as many heads as query, or one that all heads of query share. `value` is undefined
  // where the call asks for the weights alone.
  at::Tensor query, key, value;
  c10::SymFloat scale;
  double softcap;
  at::Tensor tanhs;         // of softcap; undefined: there is none
  at::Tensor lse;           // [..., L, 1]
  at::Tensor weights;       // P
  at::Tensor sink_weights;  // [..., L, 1]; undefined: there are no sinks
  at::Tensor kept;          // K; undefined: there is no dropout
};

Steps steps_of(const Call& call);

// tensor.expand(sizes), and at::sum_to(tensor, sizes), which takes a gradient back. Both go one
// dimension at a time, and so does the derivative of spread: where the result of a sum is a single
// number, torch divides it among threads, and its last digits depend on how many there are.
at::Tensor spread(const at::Tensor& tensor, c10::SymIntArrayRef sizes);
at::Tensor gathered(at::Tensor tensor, c10::SymIntArrayRef sizes);

// `weights` times K.
at::Tensor after_dropout(const at::Tensor& weights, const Steps& steps);
// Key or value, or their tangents, with a head for every head of query if enable_gqa shares them.
at::Tensor for_each_head(const Call& call, const at::Tensor& tensor, at::ScalarType type);
// |i + S - L - j|.
at::Tensor distances(const Steps& steps);
// A number for each head, [..., H, L, 1], as a factor of the scores.
at::Tensor per_head(const at::Tensor& tensor, const Steps& steps);

// How scores change along the tangents of a call, and what follows from that.
struct Changes {
  at::Tensor dots;     // udot; undefined: dot products do not change
  at::Tensor lse;      // mu, [..., L, 1]
  at::Tensor weights;  // Pdot
};
Changes changes_of(const Call& call, const Steps& steps);
at::Tensor output_tangent(const Call& call, const Steps& steps, const Changes& changes);

// The gradient of the scores is weights * difference.
struct FirstDerivative {
  at::Tensor of_weights;  // g, the gradient of the weights before dropout
  at::Tensor delta;       // E, [..., L, 1]
  at::Tensor difference;  // g - E
};
FirstDerivative first_derivative(const Call& call, const Steps& steps);

// The gradient of the dot products times scale, from that of the scores.
at::Tensor before_options(const at::Tensor& grad_scores, const Steps& steps);
// How it changes. `change`: of the gradient of the scores; of_dots: before_options of that
// gradient.
at::Tensor change_before_options(const at::Tensor& change, const at::Tensor& of_dots,
                                 const Changes& changes, const Steps& steps);
// The gradient of an argument that is added to the scores, or is a factor of what is, from that of
// the scores.
at::Tensor gradient_of_option(Argument argument, const at::Tensor& grad_scores, const Steps& steps);
// The gradient of an argument from that of its broadcast, whose heads may be those of the group.
at::Tensor reduced(const Call& call, Argument argument, at::Tensor gradient);

}  // namespace qkv::ops
