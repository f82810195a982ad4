// What is to be computed: the inputs and options of a call.
//
//   score_ij  = f(softcap(scale * dot(query_i, key_j))) - slope * |i + S - L - j| + sum_m mask_m,ij
//   weight_ij = kept_ij / (1 - dropout_p) * exp(score_ij - lse_i)
//   lse_i     = log(exp(sink) + sum_j exp(score_ij))
//   output_i  = sum_j weight_ij * value_j
//
// for every batch item and head, where j runs over the keys that query i may see, softcap(x) is c *
// tanh(x / c), f a score program (score_program.h), and kept_ij is 0 for what dropout drops,
// else 1.
//
// Shapes, with L = seqlen_q, S = seqlen_k, D = head_dim, Dv = head_dim_v:
//   query [B..., H, L, D]   key [B..., Hkv, S, D]   value [B..., Hkv, S, Dv]
//   mask  [B..., H, L, S]   output [B..., H, L, Dv] lse   [B..., H, L]
//   slope, sink [B..., H]
// Query head h reads key/value head h / (H / Hkv).
#pragma once

#include <array>
#include <cstdint>

#include "common/tensor.h"
#include "score_program.h"

namespace qkv {

enum class MaskType : uint8_t { none, boolean, f32, f64, bf16, f16 };

// [B..., H, L, S]. A boolean mask has bytes, and a query may attend to a key where the byte is not
// 0. Any other one, of f32 or of `dtype`, is added to the score, so that -inf masks.
struct Mask {
  MaskType type = MaskType::none;
  Input input;
};
// How many masks a Problem may have: a pair is hidden where one of them hides it. Only the first
// may be boolean.
constexpr int kMasks = 2;
inline bool is_floating(const Mask& mask) {
  return mask.type != MaskType::none && mask.type != MaskType::boolean;
}

// Int32 [B..., H, L, 2 * count]: query i sees only keys begin <= j < end, for each begin and end of
// its row, which follow each other: begin, end, begin, end ... Spans may be empty and may overlap;
// 0 <= begin <= end <= S. Null data: there are none.
struct KeySpans {
  Input input;
  int64_t count = 0;
};

// Learned numbers of heads that scores are made with: tensors [B..., H] of doubles.
enum HeadNumber : uint8_t { kAlibiSlopes, kSinks, kHeadNumbers };

// Pages of `size` rows each in two tensors, key [pages, Hkv, size, D] and value [pages, Hkv, size,
// Dv]. Key j is row j % size of page table[j / size], and page n begins n * key_stride elements
// (n * value_stride, of value) after the beginning of its tensor. The table is that of the batch
// item, Span::pages; if it is null, keys and values do not lie in pages. For the forward pass only.
struct Pages {
  const int32_t* table = nullptr;
  int64_t size = 0;
  int64_t key_stride = 0, value_stride = 0;
  int64_t key_scale_stride = 0, value_scale_stride = 0;  // likewise, of Problem::key_scale
};

// Where the rows of one batch item are, if items have rows of different numbers: of a document in a
// packed batch, or of a sequence in a cache. Its queries are rows [query_begin, query_begin +
// seqlen_q) of query and of all tensors that have a row for each query; its keys are rows
// [key_begin, key_begin + seqlen_k) of batch item `key_item` of all tensors that have a row for
// each key, or lie in pages. Masks, slopes and sinks have a batch item of their own for it, and
// count rows and columns from its first query and key on.
struct Span {
  int64_t query_begin = 0, seqlen_q = 0;
  int64_t key_begin = 0, seqlen_k = 0;
  int64_t key_item = 0;
  const int32_t* pages = nullptr;  // Pages::table
};

// Where a Problem stands in a whole of which it is a part: in a sequence that is cut over several
// machines, or in a cache. Its query i is query query_offset + i of seqlen_q, its key j is key
// key_offset + j of seqlen_k, and its head h is head head_offset + h of `heads`; 0 for a size of
// the whole: as many as the Problem has itself. What positions mean (is_causal, the window, ALiBi's
// distances and dropout's counters) is then as in the whole. Batch items: Problem::dropout_batch.
struct Shard {
  int64_t query_offset = 0, key_offset = 0, head_offset = 0;
  int64_t seqlen_q = 0, seqlen_k = 0, heads = 0;
};

// How scores are made. There is more than one way, and each has its own last digits: a weight is
// exp(score - lse), which with scores of 1e6 tells nothing where the score was made in another way
// than those behind the lse. So whoever computes with an lse says how the pass that left it made
// its scores, unless that was attention_forward with the same tensors and settings (dispatch.h).
//
// Scores are made by tiles, of elements or, for bf16 where the instruction set has such products,
// of pairs. Where a plane has few rows (dispatch/few_rows.h), they are made row by row.
enum class ScoreWay : uint8_t {
  automatic,  // fixed where reproducible(); else pairs where half_products() is native, or elements
  elements,   // few rows row by row; others by tiles of elements
  pairs,      // few rows row by row; others by tiles of pairs, if the instruction set has them
  tiles,      // by tiles of elements: as attention_jvp does whose output is wanted
  fixed,      // as kernels of fixed bits do (reproducible() in dispatch/dispatch.h)
  few_rows,   // row by row, whatever value is: for a backward pass
};

struct MaskMaps;

// A call's inputs and options. Every pointer must be aligned to its element type.
struct Problem : Batch {
  DType dtype = DType::f32;  // of query, key, value, output and their gradients
  int64_t heads = 1;         // H
  int64_t kv_heads = 1;      // Hkv, divides H
  int64_t seqlen_q = 0;      // L
  int64_t seqlen_k = 0;      // S
  // If not null: a span for every batch item, batch_rank is 1, and no item has the L and S above.
  // Without weights: neither ForwardResult::weights nor BackwardArgs::grad_weights.
  const Span* spans = nullptr;
  Span rows;               // of an item(); its beginnings are 0 otherwise
  int64_t head_dim = 0;    // D
  int64_t head_dim_v = 0;  // Dv
  double scale = 1.0;
  bool is_causal = false;  // top-left aligned: query i sees keys j <= i
  // Bottom-right aligned: query i sees keys
  // i + S - L - window_left <= j <= i + S - L + window_right. A negative side is open.
  int64_t window_left = -1, window_right = -1;
  double softcap = 0;  // c > 0; if 0, scores are not capped

  Input query;
  Input key;
  Input value;
  Pages pages;
  // Float [B..., Hkv, S] (col unused), or, in pages, [pages, Hkv, size]; strides of 0 broadcast. If
  // they are given, both are: key and value are int8 in memory, and row j of a head stands for its
  // numbers times the scale of that row. For the forward pass only, and not for f64; null: key and
  // value are of `dtype`.
  Input key_scale, value_scale;
  std::array<Mask, kMasks> masks;
  KeySpans key_spans;
  // What the masks and spans show (common/mask_map.h), made by the functions of attention.h from
  // what their callers give them; null from these callers.
  const MaskMaps* maps = nullptr;
  std::array<Input, kHeadNumbers> by_head;  // null data: the problem has none
  const ScoreFunction* function = nullptr;  // null: the problem has none

  // The probability of dropping a weight, 0 to 1. If it is not 0, L and S are limited to
  // kMaxDropoutQueries and kMaxDropoutKeys (common/philox.h).
  double dropout_p = 0;
  uint64_t dropout_seed = 0;
  int64_t dropout_batch = 0;  // the number of the first batch item for dropout and the function
  // If not null: seeds instead of dropout_seed, one for every dropout_items batch items, which
  // dropout numbers from dropout_batch on again. So each of these parts of the batch drops what it
  // would drop as a Problem of its own.
  const int64_t* dropout_seeds = nullptr;
  int64_t dropout_items = 1;

  ScoreWay score_way = ScoreWay::automatic;

  Shard shard;  // the i, j, L and S of is_causal, the window, ALiBi and dropout are the whole's

  int num_threads = 1;

  // With spans: the same problem, with L, S and rows of batch item b. It knows the item by the same
  // number, so that all that belongs to batch items is found as before.
  Problem item(int64_t b) const {
    Problem p = *this;
    p.rows = spans[b];
    p.seqlen_q = p.rows.seqlen_q, p.seqlen_k = p.rows.seqlen_k;
    p.pages.table = p.rows.pages;
    return p;
  }
  // The seed of batch item b, and the number by which dropout knows that item.
  uint64_t seed_of(int64_t b) const {
    return dropout_seeds ? uint64_t(dropout_seeds[b / dropout_items]) : dropout_seed;
  }
  int64_t dropout_number(int64_t b) const {
    return dropout_batch + (dropout_seeds ? b % dropout_items : b);
  }
  // Of dropout's counters: the number of head h of batch item b.
  int64_t dropout_plane(int64_t b, int64_t h) const {
    return dropout_number(b) * (shard.heads ? shard.heads : heads) + shard.head_offset + h;
  }
  // Query i stands beside key i + top_left() where the first query and the first key of the whole
  // do, and beside key i + bottom_right() where the last ones do.
  int64_t top_left() const { return shard.query_offset - shard.key_offset; }
  int64_t bottom_right() const {
    const int64_t queries = shard.seqlen_q ? shard.seqlen_q : seqlen_q;
    const int64_t keys = shard.seqlen_k ? shard.seqlen_k : seqlen_k;
    return keys - queries + top_left();
  }
  bool is_int8() const { return key_scale.data != nullptr; }  // key and value
  // Query heads that share one key/value head.
  int64_t group() const { return kv_heads && heads != kv_heads ? heads / kv_heads : 1; }
  int64_t plane_rows() const { return group() * seqlen_q; }
};

}  // namespace qkv
