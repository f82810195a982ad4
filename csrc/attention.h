// The public interface of the kernel library: no torch, no Python.
//
//   output[b, h, i, :] = sum_j softmax_j(score[b, h, i, j]) * value[b, h, j, :]
//   score[b, h, i, j]  = scale * dot(query[b, h, i, :], key[b, h, j, :]) + mask[b, h, i, j]
//
// Shapes, with L = seqlen_q, S = seqlen_k, D = head_dim, Dv = head_dim_v:
//   query [B..., H, L, D]   key [B..., Hkv, S, D]   value [B..., Hkv, S, Dv]
//   mask  [B..., H, L, S]   output [B..., H, L, Dv] lse   [B..., H, L]
// Query head h reads key/value head h / (H / Hkv).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace qkv {

// Leading batch dimensions a Problem can hold after the caller has merged
// those that merge. torch's own kernels take 1.
constexpr int kMaxBatchRank = 8;

enum class DType : uint8_t { f32, f64 };
enum class MaskType : uint8_t { none, boolean, f32, f64 };

// Strides of a view [batch..., head, row, col], in elements. Zero broadcasts.
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

// What is to be computed. Every pointer must be aligned to its element type.
struct Problem {
  DType dtype = DType::f32;  // of query, key, value, output and every gradient
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

  Input query;
  Input key;
  Input value;
  // boolean: nonzero byte = may attend. f32, f64: added to the score, -inf masks.
  MaskType mask_type = MaskType::none;
  Input mask;

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
  // Natural logarithm of the softmax's denominator, [B..., H, L] (col unused).
  // f32 for f32, f64 for f64. Null data: not wanted.
  Output lse;
};

// Null grad_* data in the outputs: that gradient is not wanted.
struct BackwardArgs {
  Input output;       // what attention_forward returned
  Input lse;          // likewise
  Input grad_output;  // null data: zero
  Input grad_lse;     // null data: zero
  Output grad_query;
  Output grad_key;
  Output grad_value;
};

// A row with nothing to attend to gets output 0, lse -inf and gradients 0.
// The results are bitwise independent of num_threads and of the batch size.
// Throws std::bad_alloc when the workspace cannot be had.
void attention_forward(const Problem& problem, const ForwardResult& result);
void attention_backward(const Problem& problem, const BackwardArgs& args);

// The instruction sets this CPU can run, best first: "avx512", "avx2", "generic".
std::vector<const char*> supported_isas();

// The one in use: the best, or what the environment variable QKV_ISA or
// set_isa() asked for. Both throw std::invalid_argument for a name that is
// unknown or that this CPU cannot run.
const char* active_isa();
void set_isa(const char* name);

}  // namespace qkv
