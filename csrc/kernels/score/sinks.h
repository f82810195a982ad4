// A sink is a score without a value: the sum of the softmax begins with exp(sink).
#pragma once

#include "attention_jvp.h"
#include "kernels/operands/tile.h"
#include "kernels/score/softmax.h"
#include "kernels/simd/vec.h"

namespace qkv::QKV_ISA {

// Begins the online softmax of a tile: its largest scores are the sinks, and its sums, which are
// relative to R, the weights of these. Sinks that are NaN or +inf wait for finish_sinks.
template <class T, class R = Reference<T>>
void add_sinks(const Problem& p, const Tile& tile, T* max_state, T* sum_state) {
  constexpr int W = kLanes<T>;
  for (int v = 0; v < tile.lanes / W; ++v) {
    Vec<T> sink = per_head<T>(p, tile, p.by_head[kSinks], v);
    sink = sink < kInfinity<T> ? sink : splat(-kInfinity<T>);
    const R reference(sink);
    Vec<T> weight[] = {sink - reference.base};
    exp<T>(weight, {ShiftedExp<T>(reference.shift)});
    store(max_state + v * W, sink);
    store(sum_state + v * W, weight[0]);
  }
}

// The sink of one row of a key head, or null if there are no sinks.
inline const double* sink_of_row(const Problem& p, Plane plane, int64_t row) {
  const int64_t head = plane.kv_head * p.group() + row % p.group();
  return qkv::plane<double>(p, p.by_head[kSinks], plane.batch, head);
}

// Whether a sink of the tile's heads is NaN or +inf.
template <class T>
bool any_sink_waits(const Problem& p, const Tile& tile) {
  bool waits = false;
  for (int64_t head = 0; head < p.group(); ++head)
    waits |= !(T(*sink_of_row(p, tile.plane, head)) < kInfinity<T>);
  return waits;
}

// Adds sinks that are NaN or +inf when all keys have been seen: they make NaN of the sum, but not
// of a row all of whose scores are -inf, which has output 0 and the sink as its log-sum-exp.
template <class T>
void finish_sinks(const Problem& p, const Tile& tile, T* max_state, T* sum_state) {
  if (!any_sink_waits<T>(p, tile)) return;
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const Vec<T> sink = per_head<T>(p, tile, p.by_head[kSinks], v / kLanes<T>);
    const Vec<T> max = load(max_state + v), sum = load(sum_state + v);
    const Vec<T> spoilt = sum == 0 ? splat(T(1)) : splat(std::numeric_limits<T>::quiet_NaN());
    store(max_state + v, sink < kInfinity<T> ? max : sink);
    store(sum_state + v, sink < kInfinity<T> ? sum : spoilt);
  }
}

// sum_jvp [lanes] = the part of the sinks in the sum of weights, times the changes of the sinks. A
// sink of -inf has no part. `finishes`: only of the sinks of finish_sinks, which do at the end.
template <class T>
void add_sinks_jvp(const Problem& p, const JvpArgs& a, const Tile& tile, const T* max_state,
                   const T* sum_state, bool finishes, T* sum_jvp) {
  for (int v = 0; v < tile.lanes; v += kLanes<T>) {
    const Vec<T> change = per_head<T>(p, tile, a.by_head[kSinks], v / kLanes<T>);
    const Vec<T> part = load(sum_state + v);
    const Vec<T> product = part == 0 ? Vec<T>{} : part * change;
    const Vec<T> begun = load(max_state + v) < kInfinity<T> ? load(sum_jvp + v) : product;
    store(sum_jvp + v, finishes ? begun : product);
  }
}

}  // namespace qkv::QKV_ISA
