// A Case: the sizes and options of the attention problem that a test runs, and the results it
// wants.
#pragma once

#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

#include "attention.h"
#include "tensors.h"

namespace qkv {

inline std::ostream& operator<<(std::ostream& out, DType dtype) {
  constexpr const char* names[] = {"f32", "f64", "bf16", "f16"};
  return out << names[int(dtype)];
}
inline std::ostream& operator<<(std::ostream& out, MaskType mask) {
  constexpr const char* names[] = {"none", "boolean", "f32", "f64", "bf16", "f16"};
  return out << names[int(mask)];
}

}  // namespace qkv

namespace qkv::test {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

constexpr DType kDTypes[] = {DType::f32, DType::f64, DType::bf16, DType::f16};

inline bool is_half(DType dtype) { return size_of(dtype) == 2; }

inline double largest_number(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return std::numeric_limits<float>::max();
    case DType::bf16:
      return 0xFFp120;
    case DType::f16:
      return 65504;
    default:
      return std::numeric_limits<double>::max();
  }
}

// The types of floating masks that a problem of this dtype may have.
inline std::vector<MaskType> float_masks(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return {MaskType::f32, MaskType::bf16};
    case DType::f16:
      return {MaskType::f32, MaskType::f16};
    case DType::f64:
      return {MaskType::f32, MaskType::f64};
    default:
      return {MaskType::f32};
  }
}

inline std::vector<MaskType> all_masks(DType dtype) {
  std::vector<MaskType> all = float_masks(dtype);
  all.push_back(MaskType::boolean);
  return all;
}

struct Case {
  DType dtype = DType::f32;
  Sizes batch = {};
  int64_t kv_heads = 1, group = 1;  // H = kv_heads * group
  int64_t L = 4, S = 4, D = 8, Dv = 8;
  double scale = kNaN;  // NaN stands for 1 / sqrt(D)
  bool is_causal = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;
  MaskType mask_type = MaskType::none;
  Sizes mask_strides = {};              // if empty, they are drawn as those of the other inputs are
  MaskType bias_type = MaskType::none;  // of a second mask, floating
  int64_t key_spans = 0;                // how many a query has; 0: the problem has none
  bool alibi_slopes = false, sinks = false;
  double dropout_p = 0;
  int64_t dropout_batch = 0;
  uint64_t dropout_seed = 0;  // 0 stands for `seed`
  Shard shard = {};
  bool own_seeds = false;  // for each item of the first dimension of batch, at most three
  int64_t key_head_repeat = 1, value_head_repeat = 1;
  bool int8 = false;  // keys and values are (test_int8.cpp)

  // Which gradients the backward pass is given.
  bool grad_output = true, grad_lse = true, grad_weights = false;
  // Which results are wanted: lse of run_forward(), all others of run().
  bool lse = true;
  bool grad_query = true, grad_key = true, grad_value = true;
  bool grad_mask = false, grad_mask_keys = false, grad_mask_queries = false;  // float masks
  bool grad_bias = false, grad_bias_keys = false, grad_bias_queries = false;
  bool grad_alibi_slopes = false, grad_sinks = false;
  bool weights = false;
  double weights_factor = 1;
  // Whether grad_mask and grad_bias are sums over the batch, and they and weights over the heads.
  bool share_batch = false, share_heads = false;

  bool strided = false;   // tensors have any strides, zeros among them; else they are dense
  bool at_front = false;  // where tensors lie in their GuardedMemory
  int num_threads = 1;
  uint64_t seed = 1;

  int64_t heads() const { return kv_heads * group; }
  double effective_scale() const { return std::isnan(scale) ? 1 / std::sqrt(double(D)) : scale; }
  bool float_mask() const { return mask_type != MaskType::none && mask_type != MaskType::boolean; }
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << c.dtype << " batch [";
  for (int64_t b : c.batch) out << b << " ";
  return out << "] kv_heads " << c.kv_heads << " group " << c.group << " L " << c.L << " S " << c.S
             << " D " << c.D << " Dv " << c.Dv << " scale " << c.effective_scale() << " causal "
             << c.is_causal << " window " << c.window_left << "," << c.window_right << " softcap "
             << c.softcap << " mask " << c.mask_type << " bias " << c.bias_type << " spans "
             << c.key_spans << " slopes " << c.alibi_slopes << " sinks " << c.sinks << " dropout "
             << c.dropout_p << " at batch " << c.dropout_batch << " dropout seed " << c.dropout_seed
             << " shard from " << c.shard.query_offset << "," << c.shard.key_offset << ","
             << c.shard.head_offset << " of " << c.shard.seqlen_q << "," << c.shard.seqlen_k << ","
             << c.shard.heads << " own seeds " << c.own_seeds << " head_repeat "
             << c.key_head_repeat << "," << c.value_head_repeat << " given grad_output,lse,weights "
             << c.grad_output << c.grad_lse << c.grad_weights << " wanted q,k,v " << c.grad_query
             << c.grad_key << c.grad_value << " mask,keys,queries " << c.grad_mask
             << c.grad_mask_keys << c.grad_mask_queries << " bias,keys,queries " << c.grad_bias
             << c.grad_bias_keys << c.grad_bias_queries << " slopes,sinks,weights "
             << c.grad_alibi_slopes << c.grad_sinks << c.weights << " * " << c.weights_factor
             << " shared batch,heads " << c.share_batch << c.share_heads << " strided " << c.strided
             << " at_front " << c.at_front << " threads " << c.num_threads << " seed " << c.seed;
}

// Three queries and four keys in f64, for numbers that are worked out by hand.
inline Case small_case() {
  Case c;
  c.dtype = DType::f64;
  c.L = 3, c.S = 4, c.D = 2, c.Dv = 3;
  return c;
}

// A case of any sizes, strides, heads and options, cheap enough for the reference.
Case random_case(uint64_t seed);

// Draws the options of a case anew, and leaves its sizes. In a third of the cases is_causal and the
// mask are the only options; in the others any come together.
void draw_options(Random& random, Case& c);
DType draw_dtype(Random& random);
MaskType draw_mask(Random& random, DType dtype);  // MaskType::none is among them

}  // namespace qkv::test
