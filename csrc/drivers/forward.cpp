// Passes in which every row stands for itself: the forward pass, hard attention, forward-mode
// derivatives, and the sums that the backward pass needs of some rows. How a stretch of batch items
// is cut into work items, and what each item does.
//
// An item is some rows of one plane against one split of its keys. Where keys are split, each split
// leaves a part of each row's output in memory, and a second phase merges them. If there are
// planes enough for all threads, an item is a whole plane instead (by plane): it takes split after
// split and merges at the end, and its parts are in its thread's memory. Both give the same bits.
//
// Only the forward pass splits keys, and not where the weights are wanted. If the weights of all
// heads are added up, an item is the same rows of all planes of a batch item, one plane after the
// other.
#include <algorithm>
#include <numeric>
#include <optional>

#include "attention_jvp.h"
#include "common/workspace.h"
#include "mask_maps.h"
#include "pass.h"

namespace qkv {
namespace {

// The keys of one split, where the keys are split, for planes of up to kSplitRows rows: a few
// hundred microseconds of reading from memory. A split leaves a row of output for each of its rows,
// so planes of more rows have proportionally larger splits: the parts that wait to be merged then
// take at most a quarter of a byte for each element of the values, which is an eighth of their size
// in half precision. The splits of a plane are equal but for the last one, as their sizes are
// multiples of kSplitUnit.
constexpr int64_t kSplitKeys = 512;
constexpr int64_t kSplitRows = 32;
constexpr int64_t kSplitUnit = 64;
// The most queries of a plane whose keys are split although its rows are more than two tiles: a
// decoding step has few queries, and all heads that share keys read them together.
constexpr int64_t kFewQueries = 16;
// Where the weights are wanted, a kernel keeps those of all rows that it is called with. They are
// no more bytes than this, if one tile has not more: they and the elements that they are added to
// fit into a second-level cache of 1 MiB.
constexpr int64_t kWeightsBytes = int64_t(512) << 10;

// The pass of one stretch, for Pass.
class RowTask {
 public:
  // `result`, and `item`, the problem of any batch item of the stretch: see for_each_row_item.
  RowTask(const Problem& call, const Kernels& kernels, const RowKernel& kernel,
          const ForwardResult* result, const Stretch& stretch, const Problem& item)
      : p_(call),
        kernels_(kernels),
        kernel_(kernel),
        result_(result),
        stretch_(stretch),
        planes_(item, stretch.count, 1),
        seqlen_k_(item.seqlen_k),
        first_split_(seqlen_k_),
        element_(size_of(compute_type(p_.dtype))),
        keeps_weights_(result && result->weights.data),
        sums_heads_(keeps_weights_ && result->weights.strides.head == 0),
        item_planes_(sums_heads_ ? p_.kv_heads : 1) {
    if (result && !keeps_weights_) split_keys(item);
  }

  double flops() const { return double(planes_.count) * planes_.flops; }
  // Decides how many rows an item has, and in which order items go. No row's result depends on the
  // other rows of its item, so this may follow the number of threads.
  void plan(const Team& team) {
    const int64_t pieces = team.pieces(planes_.flops * double(item_planes_));
    item_rows_ = rows_of_item(planes_.rows, kernels_.tile_rows, ceil_div(pieces, splits_));
    if (team.flops == flops() && !p_.is_causal && item_planes_ == 1)
      item_rows_ = even_rows(item_rows_, planes_.rows, kernels_.tile_rows, planes_.count * splits_,
                             team.threads);
    call_rows_ = item_rows_;
    if (keeps_weights_) limit_kept_weights();
    row_items_ = ceil_div(planes_.rows, item_rows_);
    // With so many threads none gets two items of a plane in a row, whose keys it would have in its
    // cache: on two threads the order by rows takes 3 to 5 % longer (Zen 3, causal shapes of
    // python -m qkv.bench). On 64 the order by planes would leave a sixth of their time unused.
    const bool equal = !p_.is_causal && planes_.rows % item_rows_ == 0;
    by_rows_ = !equal && team.threads >= row_items_;
    // Parts of several items wait in memory, so only where that is needed to keep threads busy.
    by_plane_ = splits_ > 1 && pieces == 1;
  }

  // A thread has a workspace for the kernels, and behind it the parts of the plane that it works
  // on.
  size_t workspace_bytes() const {
    Arena arena(nullptr);
    arena.take<char>(int64_t(kernel_bytes()));
    if (by_plane_) arena.take<char>(parts_bytes_);
    return arena.used();
  }
  void take_memory(Arena& arena) {
    if (!by_plane_) parts_ = arena.take<char>(planes_.count * parts_bytes_);
  }

  Items items() const {
    const int64_t each = by_plane_ ? 1 : row_items_ * splits_;
    return {planes_.count / item_planes_ * each,
            planes_.flops * double(item_planes_) / double(each)};
  }
  void run(int64_t index, void* workspace) const {
    by_plane_ ? run_plane(index, workspace) : run_rows(index, workspace);
  }
  // An item merges the parts of one row.
  Items last_items() const {
    return {splits_ > 1 && !by_plane_ ? planes_.count * planes_.rows : 0,
            double((p_.head_dim_v + 1) * splits_)};
  }
  void finish(int64_t index) const {
    const int64_t plane = index / planes_.rows;
    merge(*ItemProblem(p_, stretch_.plane(p_, plane).batch), plane, index % planes_.rows,
          parts_ + plane * parts_bytes_);
  }

 private:
  // Rows [begin, end) of item_planes_ planes from `plane` on, against one split of the keys.
  struct Place {
    int64_t plane, split, begin, end;
  };

  // With few queries and many keys, the keys that any query sees are split. The order of summation
  // follows from the splits, so they follow from the shape of one plane alone; where bits are
  // fixed, there are none.
  void split_keys(const Problem& item) {
    const int64_t most_keys = kSplitKeys * ceil_div(planes_.rows, kSplitRows);
    const int64_t begin = key_begin(item, 0), keys = key_end(item, item.seqlen_q - 1) - begin;
    const bool few = planes_.rows <= 2 * kernels_.tile_rows ||
                     (item.seqlen_q <= kFewQueries && planes_.rows <= kItemRows);
    if (!few || keys <= most_keys || kernels_.fixed_bits) return;
    splits_ = ceil_div(keys, most_keys);
    split_keys_ = ceil_div(ceil_div(keys, splits_), kSplitUnit) * kSplitUnit;
    splits_ = ceil_div(keys, split_keys_);
    first_split_ = begin + split_keys_;
    output_bytes_ = splits_ * planes_.rows * p_.head_dim_v * element_;
    max_bytes_ = splits_ * planes_.rows * element_;
    parts_bytes_ = output_bytes_ + 2 * max_bytes_;
  }

  void limit_kept_weights() {
    const int64_t tile_bytes = kernels_.tile_rows * std::max<int64_t>(1, seqlen_k_) * element_;
    const int64_t most_tiles = std::max<int64_t>(1, kWeightsBytes / tile_bytes);
    call_rows_ = item_rows_ = std::min(item_rows_, most_tiles * kernels_.tile_rows);
    // The heads of a group add to the same elements, and no two items may: an item has all rows of
    // its queries.
    if (!sums_heads_) return;
    const int64_t whole_queries = std::lcm(kernels_.tile_rows, p_.group());
    item_rows_ = ceil_div(item_rows_, whole_queries) * whole_queries;
  }

  // What item `index` is, unless by plane.
  Place place(int64_t index) const {
    const int64_t each = row_items_ * splits_, all = planes_.count / item_planes_;
    const int64_t of_plane = by_rows_ ? index / all : index % each;
    // Under is_causal the last rows see the most keys, so they go first. Elsewhere the last item
    // may have the fewest rows.
    const int64_t nth = of_plane % row_items_;
    const int64_t begin = (p_.is_causal ? row_items_ - 1 - nth : nth) * item_rows_;
    return {(by_rows_ ? index % all : index / each) * item_planes_, of_plane / row_items_, begin,
            std::min(planes_.rows, begin + item_rows_)};
  }

  // Whether an item is one call of a kernel.
  bool has_simple_items() const {
    return !by_plane_ && item_planes_ == 1 && call_rows_ == item_rows_;
  }
  // The first split begins at key 0, and the kernels skip the keys before those that a query sees.
  ForwardItem kernel_item(int64_t plane, int64_t split, int64_t row, int64_t end) const {
    return {stretch_.plane(p_, plane), row, std::min(end, row + call_rows_),
            split == 0 ? 0 : first_split_ + (split - 1) * split_keys_,
            std::min(seqlen_k_, first_split_ + split * split_keys_)};
  }
  // The workspace of a kernel.
  size_t kernel_bytes() const {
    const ItemProblem item(p_, stretch_.first);
    return kernel_(*item, kernel_item(0, 0, 0, planes_.rows), nullptr);
  }

  void run_rows(int64_t index, void* workspace) const {
    const Place at = place(index);
    // Most often a thread goes on with the next item of the list.
    bool has_next = has_simple_items() && index + 1 < items().count;
    const Place to = has_next ? place(index + 1) : at;
    const ForwardItem next = kernel_item(to.plane, to.split, to.begin, to.end);
    const int64_t batch = stretch_.plane(p_, at.plane).batch;
    has_next &= !p_.spans || next.plane.batch == batch;
    const ItemProblem item(p_, batch);
    for (int64_t plane = at.plane; plane < at.plane + item_planes_; ++plane)
      for (int64_t row = at.begin; row < at.end; row += call_rows_)
        attend(*item, plane, at.split, row, at.end, parts_ + plane * parts_bytes_, workspace,
               has_next ? &next : nullptr);
  }

  void run_plane(int64_t plane, void* workspace) const {
    Arena arena(workspace);
    void* const own = arena.take<char>(int64_t(kernel_bytes()));
    char* const parts = arena.take<char>(parts_bytes_);
    const ItemProblem item(p_, stretch_.plane(p_, plane).batch);
    for (int64_t split = 0; split < splits_; ++split)
      for (int64_t row = 0; row < planes_.rows; row += item_rows_)
        attend(*item, plane, split, row, planes_.rows, parts, own);
    for (int64_t row = 0; row < planes_.rows; ++row) merge(*item, plane, row, parts);
  }

  // Runs rows [row, end), call_rows_ at most, of one plane against one split of the keys.
  void attend(const Problem& p, int64_t plane, int64_t split, int64_t row, int64_t end,
              char* plane_parts, void* workspace, const ForwardItem* next = nullptr) const {
    ForwardItem item = kernel_item(plane, split, row, end);
    item.next = next;
    if (splits_ > 1) {
      const int64_t at = split * planes_.rows + row;
      item.partial_output = plane_parts + at * p_.head_dim_v * element_;
      item.partial_max = plane_parts + output_bytes_ + at * element_;
      item.partial_lse = plane_parts + output_bytes_ + max_bytes_ + at * element_;
    }
    kernel_(p, item, workspace);
  }

  void merge(const Problem& p, int64_t plane, int64_t row, char* plane_parts) const {
    kernels_.merge_parts(p, *result_,
                         {stretch_.plane(p, plane), row, plane_parts, plane_parts + output_bytes_,
                          plane_parts + output_bytes_ + max_bytes_, splits_, planes_.rows});
  }

  const Problem& p_;  // of the call
  const Kernels& kernels_;
  const RowKernel& kernel_;
  const ForwardResult* const result_;
  const Stretch stretch_;
  Planes planes_;
  int64_t seqlen_k_;        // of each item
  int64_t splits_ = 1;      // of a plane
  int64_t split_keys_ = 0;  // the keys of a split
  int64_t first_split_;     // the end of the first split
  int64_t item_rows_ = 0,
          row_items_ = 0;  // the rows of an item, and how many such items a plane has
  int64_t call_rows_ = 0;  // the rows that a kernel is called with
  bool by_plane_ = false;
  // Whether the dearest items of all planes go first, and not the planes one after the other.
  bool by_rows_ = false;
  // The parts of one plane: outputs [splits, rows, Dv], in output_bytes_, then their largest scores
  // [splits, rows], in max_bytes_, and log-sum-exps. `element_` is the size of one number.
  int64_t element_, output_bytes_ = 0, max_bytes_ = 0, parts_bytes_ = 0;
  // Whether the forward pass leaves its weights, and whether those of all heads are added up.
  bool keeps_weights_, sums_heads_;
  int64_t item_planes_;    // the planes whose rows an item has
  char* parts_ = nullptr;  // [planes, parts_bytes_], unless by plane
};

}  // namespace

void for_each_row_item(const Problem& p, const Kernels& kernels, const RowKernel& kernel,
                       const ForwardResult* result) {
  if (!p.spans && p.seqlen_q == 0) return;
  const std::vector<Stretch> stretches = stretches_of(p);
  Pass<RowTask> pass(stretches.size(), p.num_threads);
  for (const Stretch& stretch : stretches)
    pass.add(p, kernels, kernel, result, stretch, *ItemProblem(p, stretch.first));
  pass.run();
}

void attention_forward(const Problem& problem, const ForwardResult& result) {
  const Kernels& kernels = kernels_for(problem);
  const auto run = [&](const Problem& p, const ForwardItem& rows, void* workspace) {
    return kernels.forward(p, result, rows, workspace);
  };
  for_each_row_item(*MappedProblem(problem), kernels, run, &result);
}

void attention_hard(const Problem& problem, const HardResult& result) {
  const Kernels& kernels = kernels_for(problem);
  const auto run = [&](const Problem& p, const ForwardItem& rows, void* workspace) {
    return kernels.hard(p, result, rows, workspace);
  };
  for_each_row_item(*MappedProblem(problem), kernels, run);
}

void attention_jvp(const Problem& problem, const JvpArgs& args, const JvpResult& result) {
  const Kernels& kernels = jvp_kernels(problem);
  const auto run = [&](const Problem& p, const ForwardItem& rows, void* workspace) {
    return kernels.jvp(p, args, result, rows, workspace);
  };
  for_each_row_item(*MappedProblem(problem), kernels, run);
}

}  // namespace qkv
