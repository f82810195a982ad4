// The table of kernels that an instruction set fills: one object for each isa/<name>/kernels.cpp.
//
// Kernels work on one plane: one batch item and one key/value head. The queries of all heads that
// share this key/value head are one list of G * L rows (G = H / Hkv), where row r is query r / G of
// the group's head r % G. So neighbouring rows have neighbouring positions, and a tile of rows
// reads the same keys, whichever heads it covers.
#pragma once

#include "attention.h"
#include "attention_jvp.h"
#include "common/half.h"
#include "common/strides.h"
#include "common/visible.h"
#include "dispatch/few_rows.h"
#include "dispatch/peak_loop.h"
#include "rotation.h"
#include "row_product.h"

namespace qkv {

// An item of the forward pass: rows [row_begin, row_end) of a plane against keys [key_begin,
// key_end). row_begin is a multiple of Kernels::tile_rows.
struct ForwardItem {
  Plane plane;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;
  // If null, the keys are all keys, and rows go to the ForwardResult. Else they are one split of
  // them, and from row_begin on their output goes to partial_output [rows, Dv], its largest score
  // (0: none) to partial_max [rows] and its log-sum-exp less that to partial_lse [rows]: one number
  // would lose how many keys share a score of 1e30. Where ForwardResult::weights is wanted, there
  // are no splits, and items that run at the same time share no element of it.
  void *partial_output = nullptr, *partial_max = nullptr, *partial_lse = nullptr;
  // The item that the thread will probably run next, whose first rows are fetched. Null: unknown.
  const ForwardItem* next = nullptr;
};

// The parts of row `row` of a plane of `rows` rows whose keys were split: for each split, what the
// kernel wrote to ForwardItem's partial_output, partial_max and partial_lse.
struct RowParts {
  Plane plane;
  int64_t row;
  void* output;           // [splits, rows, Dv]; that of the first split is overwritten
  const void *max, *lse;  // [splits, rows]
  int64_t splits, rows;
};

// A block of rows: this many neighbouring rows of a plane go through the backward pass together.
// They are packed once for all keys of an item, and are the depth of the products that make the
// gradients of key and value.
constexpr int64_t kGradRows = 64;

// Keys [key_begin, key_end) are seen by no rows but [grad_row_begin, grad_row_end), of which the
// first is a multiple of kGradRows.
inline int64_t grad_row_begin(const Problem& p, int64_t key_begin) {
  return query_begin(p, key_begin) * p.group() / kGradRows * kGradRows;
}
inline int64_t grad_row_end(const Problem& p, int64_t key_end) {
  return query_end(p, key_end) * p.group();
}

// What is in memory for grad_query of a block of rows.
enum class QuerySums : uint8_t {
  none,      // nothing was added to its sums yet: they are 0, whatever is in memory
  begun,     // the sums of items so far
  complete,  // not the sums, but the gradient itself, in BackwardArgs::grad_query
};

// The sums of the backward pass over one plane, to which its items add. T is the compute type, and
// padded(n) is n rounded up to whole vectors. Null: not wanted.
//
// They may be the gradients themselves, where these have the compute type and lie densely enough.
struct BackwardSums {
  // Of grad_query, without its factor, scale: row r of the plane is at element
  // r / G * query_row + r % G * query_head, and has padded(D) elements.
  void* grad_query = nullptr;
  int64_t query_row = 0, query_head = 0;
  QuerySums* query_sums = nullptr;              // [blocks of rows]
  void* grad_key = nullptr;                     // [S, padded(D)], without scale
  void* grad_value = nullptr;                   // [S, padded(Dv)]
  std::array<double*, kHeadNumbers> by_head{};  // [blocks of rows, G]; null for sinks
  // Of GradMask::queries [G * L], and of GradMask::keys [S, G].
  std::array<double*, kMasks> mask_rows{};
  std::array<void*, kMasks> mask_keys{};
};

// An item of the backward pass: rows [row_begin, row_end) of a plane, whole blocks of them, against
// keys [key_begin, key_end), whole strips of `strip_keys` keys, of which the last of the plane may
// be shorter. A block of rows meets strip after strip, in the order of the keys or, if `descends`,
// the other way round; and a strip meets the blocks of rows in their order. Nothing is added up
// beyond a strip and a block before it is added to `sums`, so how a plane is cut into items does
// not matter: what matters is in which order a block meets the strips, and a strip the blocks.
// Items that run at the same time share no rows, no keys and no element of GradMask::each.
struct BackwardItem {
  Plane plane;
  int64_t row_begin, row_end;
  int64_t key_begin, key_end;
  int64_t strip_keys;
  bool descends;
  // Whether no item after this one adds to the sums of these rows, of which there is one part.
  bool completes_rows;
  const BackwardSums& sums;
  void* tables = nullptr;  // the sum of a score program (drivers/table_sums.h)
  // The plane that the thread will probably go on with, as ForwardItem::next. Null: not known, or
  // the item is not all of its plane.
  const Plane* next = nullptr;
};

// Rows, or keys, [begin, end) of a plane to which no item adds any more. Of rows there are `parts`
// of the sums, of which each is `part_bytes` after the one before, and its query_sums
// `part_blocks`. They are added up.
struct Finished {
  Plane plane;
  int64_t begin, end;
  const BackwardSums& sums;
  int64_t parts = 1, part_bytes = 0, part_blocks = 0;
};

// The kernels for one dtype. The parts that items leave are in the compute type.
//
// Each thread has a workspace. A kernel that takes one returns how many bytes of it the item needs,
// and does nothing else if it is null.
struct Kernels {
  int64_t tile_rows;  // the most rows of a tile; items of the forward pass begin at multiples of it
  // Of how many keys the blocks are that a pass cuts `keys` keys into.
  int64_t (*key_step)(int64_t keys);
  size_t (*forward)(const Problem&, const ForwardResult&, const ForwardItem&, void* workspace);
  // Puts the parts of a row together, and writes it to the result.
  void (*merge_parts)(const Problem&, const ForwardResult&, const RowParts&);
  // Its workspace follows from the number of the item's keys alone. Where pairs are multiplied,
  // BackwardArgs has no direction, and jvp is null (jvp_kernels).
  size_t (*backward)(const Problem&, const BackwardArgs&, const BackwardItem&, void* workspace);
  void (*finish_rows)(const Problem&, const BackwardArgs&, const Finished&);
  void (*finish_keys)(const Problem&, const BackwardArgs&, const Finished&);
  // Of these three, the item has all keys, and leaves no part.
  size_t (*row_sums)(const Problem&, const BackwardArgs&, const Output& sums, const ForwardItem&,
                     void* workspace);
  size_t (*hard)(const Problem&, const HardResult&, const ForwardItem&, void* workspace);
  size_t (*jvp)(const Problem&, const JvpArgs&, const JvpResult&, const ForwardItem&,
                void* workspace);
  size_t (*rotate)(const Rotation&, const RotationItem&, void* workspace);
  size_t (*row_product)(const RowProduct&, const RowProductItem&, void* workspace);  // null: none

  int lanes;                                // elements in a vector
  bool multiplies_pairs, multiplies_tiles;  // of bf16; and these by AMX
  bool fixed_bits;                          // kernels/fixed_bits.h
  double (*exp)(double);                    // for drivers
  // Of products as this dtype's factors have them: half precision that is widened has those of f32.
  PeakLoop peak;
};

// One instruction set: its name, and its kernels for each dtype.
struct Implementation {
  const char* name;
  bool (*supported)();
  std::array<Kernels, 4> own;  // by DType
  // The instruction set whose kernels serve the dtypes for which this one has none of its own.
  const Implementation* others = nullptr;
  // The same instruction set's kernels of fixed bits; null: those that `others` has.
  const Implementation* fixed_bits = nullptr;

  const Kernels& kernels(DType dtype) const {
    const Kernels& kernels = own[size_t(dtype)];
    return kernels.forward ? kernels : others->kernels(dtype);
  }
};

extern const Implementation kGeneric, kGenericFixedBits;
#if defined(__x86_64__)
extern const Implementation kAvx2, kAvx2FixedBits;
extern const Implementation kAvx512, kAvx512FixedBits;
extern const Implementation kAvx512Bf16;
extern const Implementation kAmx;
#elif defined(__aarch64__)
extern const Implementation kNeon, kNeonFixedBits;
#endif

// Makes an implementation known to set_isa() and QKV_ISA by its name. supported_isas() does not
// list it, and it is never the default. For tests.
void add_implementation(const Implementation& implementation);

const Implementation& active_implementation();
// The kernels of the active implementation. If half_products() is "float32", and that one would
// multiply half precision, they are those of Implementation::others, which widen it.
// Where reproducible(), they are those of Implementation::fixed_bits.
const Kernels& active_kernels(DType dtype);
// Those that have jvp, and take directions: they multiply no pairs, and widen half precision on
// every instruction set.
const Kernels& jvp_kernels(const Problem& p);
// Those that make the scores of a problem in its way (Problem::score_way). Int8 keys and values are
// widened, as in jvp_kernels.
const Kernels& kernels_for(const Problem& p);
// Those of its backward pass: with BackwardArgs::direction, the ones that take it.
inline const Kernels& kernels_for(const Problem& p, const BackwardArgs& a) {
  return a.direction ? jvp_kernels(p) : kernels_for(p);
}

}  // namespace qkv
