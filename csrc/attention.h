// The public interface of the kernel library: no torch, no Python.
//
//   score_ij  = softcap(scale * dot(query_i, key_j)) - slope * |i + S - L - j| + mask_ij
//   weight_ij = kept_ij / (1 - dropout_p) * exp(score_ij - lse_i)
//   lse_i     = log(exp(sink) + sum_j exp(score_ij))
//   output_i  = sum_j weight_ij * value_j
//
// for every batch item b and head h, j over the keys that query i may see;
// softcap(x) = c * tanh(x / c). kept_ij: see philox.h.
//
// Shapes, with L = seqlen_q, S = seqlen_k, D = head_dim, Dv = head_dim_v:
//   query [B..., H, L, D]   key [B..., Hkv, S, D]   value [B..., Hkv, S, Dv]
//   mask  [B..., H, L, S]   output [B..., H, L, Dv] lse   [B..., H, L]
//   slope, sink [B..., H]
// Query head h reads key/value head h / (H / Hkv).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "export.h"

namespace qkv {

// Leading batch dimensions a Problem can hold after the caller has merged
// those that merge. torch's own kernels take 1.
constexpr int kMaxBatchRank = 8;

enum class DType : uint8_t { f32, f64, bf16, f16 };  // bf16, f16: see half.h
enum class MaskType : uint8_t { none, boolean, f32, f64, bf16, f16 };

// What is computed with, and what everything is in that is a sum over many
// terms: f64 for f64, f32 for all others.
constexpr DType compute_type(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
constexpr int64_t size_of(DType dtype) {
  return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2;
}

// Strides of a view [batch..., head, row, col], in elements. Zero broadcasts.
// Those that a tensor has no dimension for are not used.
struct Strides {
  std::array<int64_t, kMaxBatchRank> batch{};
  int64_t head = 0;
  int64_t row = 0;
  int64_t col = 0;
  // The tensor has one head for every `head_repeat` heads of the Problem, so
  // that key and value may have different head counts. kv heads only.
  int64_t head_repeat = 1;
};

struct Input {
  const void* data = nullptr;
  Strides strides;
};

struct Output {
  void* data = nullptr;
  Strides strides;
};

// Key and value rows that lie in pages of equal size anywhere in two tensors
// [pages, Hkv, size, D or Dv]: row j is row j % size of page table[j / size], which
// begins `stride` elements times its number after the tensor. Null: they do not.
// Forward only, and for Problems of one batch item.
struct Pages {
  const int32_t* table = nullptr;
  int64_t size = 0;
  int64_t key_stride = 0, value_stride = 0;
};

// What is to be computed. Every pointer must be aligned to its element type.
struct Problem {
  DType dtype = DType::f32;  // of query, key, value, output and their gradients
  int batch_rank = 0;        // 0: one batch item
  std::array<int64_t, kMaxBatchRank> batch_sizes{};
  int64_t heads = 1;     // H
  int64_t kv_heads = 1;  // Hkv, divides H
  int64_t seqlen_q = 0;  // L
  int64_t seqlen_k = 0;  // S
  int64_t head_dim = 0;  // D
  int64_t head_dim_v = 0;
  double scale = 1.0;
  bool is_causal = false;  // top-left aligned: query i sees keys j <= i
  // Bottom-right aligned: query i sees keys
  // i + S - L - window_left <= j <= i + S - L + window_right. Negative: open.
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;  // c > 0; 0: none

  Input query;
  Input key;
  Input value;
  Pages pages;
  // boolean: nonzero byte = may attend. Others: added to the score, -inf masks.
  MaskType mask_type = MaskType::none;
  Input mask;
  Input alibi_slopes;  // [B..., H], double; null: none
  Input sinks;         // [B..., H], double; null: none

  // Probability of dropping a weight, 0 ... 1. If not 0, L and S are limited: kMaxDropout...
  // in philox.h.
  double dropout_p = 0;
  uint64_t dropout_seed = 0;
  // What dropout calls the first batch item: the documents of a packed batch
  // are Problems of their own.
  int64_t dropout_batch = 0;

  int num_threads = 1;

  int64_t batch() const {
    int64_t n = 1;
    for (int d = 0; d < batch_rank; ++d) n *= batch_sizes[d];
    return n;
  }
  // Query heads that share one key/value head.
  int64_t group() const { return kv_heads ? heads / kv_heads : 1; }
};

struct ForwardResult {
  Output output;  // [B..., H, L, Dv]
  // Natural logarithm of the softmax's denominator, [B..., H, L] (col unused), in
  // the compute type. Null data: not wanted.
  Output lse;
};

// Null data in an output: not wanted. grad_* strides of 0 only where it says so.
// output, grad_output and the gradients of query, key and value are in `dtype`, all
// others in the compute type unless they say otherwise.
struct BackwardArgs {
  Input output;       // what attention_forward returned
  Input lse;          // likewise
  Input grad_output;  // null data: zero
  Input grad_lse;     // null data: zero
  // The gradient of the weights themselves, [B..., H, L, S], and
  // sum_j weight_ij * grad_weights_ij, [B..., H, L]: both or neither.
  Input grad_weights;
  Input grad_weights_dot;

  Output grad_query;
  Output grad_key;
  Output grad_value;
  // Added to what is there, [B..., H, L, S], in f64 for a mask of f64, else f32. Batch and head
  // strides may be 0: the gradients of those that share an element are summed,
  // in their order.
  Output grad_mask;
  // Summed over the queries, [B..., H, S] (row unused), and over the keys,
  // [B..., H, L] (col unused): for masks that broadcast along those.
  Output grad_mask_keys;
  Output grad_mask_queries;
  Output grad_alibi_slopes;  // [B..., H], double
  Output grad_sinks;         // [B..., H], double
  // Not a gradient: the weights, added to what is there, [B..., H, L, S]; strides
  // as for grad_mask.
  Output weights;
};

// The best key instead of the average.
struct HardResult {
  Output output;  // value at the key with the largest score, the first if several have it
  // That key, int64, [B..., H, L] (col unused); -1, and output 0, where a row
  // has nothing to attend to. A NaN score counts as the largest.
  Output index;
};

// One of several problems that are solved together, of any sizes, on
// problem.num_threads of the first.
struct ForwardJob {
  Problem problem;
  ForwardResult result;
};
struct BackwardJob {
  Problem problem;
  BackwardArgs args;
};

// A row with nothing to attend to gets output 0, lse -inf (the sink, if there is
// one) and gradients 0. The results are bitwise independent of num_threads, of
// the batch size and of what else is solved together; sums over a batch
// (grad_mask, weights) of course depend on the batch.
// Throws std::bad_alloc when the workspace cannot be had.
QKV_CORE_API void attention_forward(const Problem& problem, const ForwardResult& result);
QKV_CORE_API void attention_forward(const std::vector<ForwardJob>& jobs);
QKV_CORE_API void attention_backward(const Problem& problem, const BackwardArgs& args);
QKV_CORE_API void attention_backward(
    const std::vector<BackwardJob>& jobs);  // no job shares an output

// [B..., H, L]: BackwardArgs::grad_weights_dot, from `args` with output, lse and grad_weights.
QKV_CORE_API void attention_weights_dot(const Problem& problem, const BackwardArgs& args,
                                        const Output& dot);

// Dropout and sinks do not take part.
QKV_CORE_API void attention_hard(const Problem& problem, const HardResult& result);

// The instruction sets this CPU can run, best first: "amx", "avx512bf16", "avx512", "avx2",
// "neon", "generic". "avx512bf16" comes after "avx512" on CPUs that have AMX (dispatch.cpp).
QKV_CORE_API std::vector<const char*> supported_isas();

// The one in use: the best, or what the environment variable QKV_ISA or
// set_isa() asked for. Both throw std::invalid_argument for a name that is
// unknown or that this CPU cannot run.
QKV_CORE_API const char* active_isa();
QKV_CORE_API void set_isa(const char* name);

// What the factors of a product are when query, key and value are in half precision. "native":
// their own type where the instruction set in use multiplies it, which is bf16 with avx512bf16 and
// amx; weights and gradients of scores are rounded to it as factors. "float32": every factor is
// widened, and nothing but results is rounded. The setting is the one that the environment variable
// QKV_HALF_PRODUCTS or set_half_products() asked for, else "native". Both throw
// std::invalid_argument for any other name. A forward pass and its backward pass belong under one
// setting: each has its own order of summation, and so its own last digits of a score.
QKV_CORE_API const char* half_products();
QKV_CORE_API void set_half_products(const char* name);

}  // namespace qkv
