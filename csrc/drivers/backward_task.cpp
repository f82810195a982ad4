#include "backward_task.h"

#include <algorithm>

#include "common/strides.h"
#include "grad_sinks.h"

namespace qkv {
namespace {

// The keys of one plane are split, so that a problem of one head can use every core: into as many
// splits as can have kSplitKeys keys each, but no more than kMaxSplits. With fewer keys in a split,
// the time to add up the parts shows.
constexpr int64_t kSplitKeys = 256;
constexpr int64_t kMaxSplits = 8;
// The bytes of all parts of grad_query of one plane, beyond which there are half as many splits.
// kMaxWaveBytes (backward.cpp) limits the parts of all planes.
constexpr int64_t kMaxPartBytes = int64_t(32) << 20;
// Where planes share GradMask::each, only one plane of a class runs at a time, and splits of its
// keys keep the threads busy. So one batch item should have about kSharedItems items at a time; but
// no split has fewer keys than kFineSplitKeys, nor so few that the parts of grad_query take more
// memory than GradMask::each. This holds for every problem that has this output, even where nothing
// is shared: whether planes share depends on the batch size, which must not change a bit.
constexpr int64_t kSharedItems = 16;
constexpr int64_t kFineSplitKeys = 128;

// Whether the kernels have to run. Only the gradient of the sinks can do without them.
bool wants_keys(const BackwardArgs& a) {
  return a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_alibi_slopes.data ||
         std::any_of(a.grad_masks.begin(), a.grad_masks.end(), [](const GradMask& grad) {
           return grad.each.data || grad.keys.data || grad.queries.data;
         });
}

int64_t split_count(const Problem& p, const BackwardArgs& args, const Sharing& sharing,
                    int64_t part_bytes) {
  int64_t splits = std::clamp<int64_t>(p.seqlen_k / kSplitKeys, 1, kMaxSplits);
  if ((splits - 1) * part_bytes > kMaxPartBytes) splits = std::min(splits, kMaxSplits / 2);
  const auto is_wanted = [](const GradMask& grad) { return grad.each.data != nullptr; };
  if (std::none_of(args.grad_masks.begin(), args.grad_masks.end(), is_wanted)) return splits;
  const int64_t finest = std::max(kFineSplitKeys, 2 * p.group() * p.head_dim);
  return std::max(splits,
                  std::min(ceil_div(kSharedItems, sharing.head_classes()), p.seqlen_k / finest));
}

// to[batch, head, row] = x, rounded to the compute type.
void store_row(const Problem& p, const Output& to, int64_t batch, int64_t head, int64_t row,
               double x) {
  const int64_t at = row * to.strides.row;
  if (compute_type(p.dtype) == DType::f32) {
    plane<float>(p, to, batch, head)[at] = float(x);
  } else {
    plane<double>(p, to, batch, head)[at] = x;
  }
}

}  // namespace

BackwardTask::BackwardTask(const Problem& problem, const BackwardArgs& args)
    : p_(problem),
      args_(args),
      kernels_(args.direction ? jvp_kernels(p_.dtype) : active_kernels(p_.dtype)),
      sharing_(p_, args),
      planes_(p_, args.direction ? 10 : 5),
      splits_(wants_keys(args) ? split_count(p_, args, sharing_, part_bytes()) : 0),
      groups_(p_, args, sharing_, splits_ > 1) {
  planes_.count = sharing_.classes();
  if (splits_ == 0) return;
  split_keys_ = std::max<int64_t>(1, ceil_div(p_.seqlen_k, splits_));
  splits_ = std::max<int64_t>(1, ceil_div(p_.seqlen_k, split_keys_));
}

int64_t BackwardTask::part_bytes() const {
  return planes_.rows * p_.head_dim * size_of(compute_type(p_.dtype));
}

void BackwardTask::plan(const Team& team) {
  const int64_t chains = planes_.count * groups_.count();
  const bool alone = flops() == team.flops;
  // Whole classes are taken where they fill the threads evenly, or nearly so: then no part has to
  // wait in memory.
  by_class_ = splits_ > 0 && (team.threads == 1 || splits_ == 1 || groups_.count() > 1 ||
                              team.pieces(flops() / double(chains), 4) == 1 ||
                              (alone && chains % team.threads == 0));
  lay_out_parts();
}

void BackwardTask::plan_by_class() {
  by_class_ = true;
  lay_out_parts();
}

void BackwardTask::lay_out_parts() {
  parts_ = by_class_ || !args_.grad_query.data ? 0 : splits_ - 1;
  Arena bytes(nullptr);
  if (splits_) bytes.take<char>(kernel_workspace(std::min(split_keys_, p_.seqlen_k)));
  kernel_bytes_ = int64_t(bytes.used());
  take_parts(bytes);
  bytes.take<char>(1);  // so that every class has a place of its own among the waves
  parts_bytes_ = int64_t(bytes.used()) - kernel_bytes_;
}

size_t BackwardTask::kernel_workspace(int64_t keys) const {
  return args_.direction ? kernels_.double_backward_workspace(p_, *args_.direction, keys)
                         : kernels_.backward_workspace(p_, keys);
}

// The first class whose parts begin in wave `wave` or a later one.
int64_t BackwardTask::first_class(int64_t wave) const {
  const int64_t bytes = std::max<int64_t>(0, wave * waves_->bytes - first_byte_);
  return std::min(planes_.count, ceil_div(bytes, parts_bytes_));
}

BackwardTask::Turn BackwardTask::turn(int64_t index, int64_t round) const {
  const int64_t wave = round / waves_->positions, position = round % waves_->positions;
  const int64_t its_class = first_class(wave) + index;
  if (position >= sharing_.positions() || its_class >= first_class(wave + 1)) return {-1, {}};
  const int64_t at = (first_byte_ + its_class * parts_bytes_) % waves_->bytes;
  Arena arena(waves_->memory + round % waves_->slots * waves_->bytes + at);
  return {sharing_.plane(its_class, position), take_parts(arena)};
}

BackwardTask::Parts BackwardTask::take_parts(Arena& arena) const {
  Parts parts = {arena.take<char>(has_sums() ? part_bytes() : 0),
                 arena.take<char>(parts_ * part_bytes()),
                 arena.take<double>(args_.grad_alibi_slopes.data ? splits_ * p_.group() : 0),
                 {}};
  for (int m = 0; m < kMasks; ++m)
    if (args_.grad_masks[m].queries.data)
      parts.mask_rows[m] = arena.take<double>(splits_ * planes_.rows);
  return parts;
}

size_t BackwardTask::workspace_bytes() const {
  return size_t(kernel_bytes_ + (by_class_ ? parts_bytes_ : 0));
}

void BackwardTask::take_memory(Arena& arena) {
  if (groups_.count() > 1) groups_.take_memory(arena);
}

Items BackwardTask::items() const {
  if (splits_ == 0) return {};
  if (!by_class_) return {wave_classes() * splits_, planes_.flops / double(splits_), rounds()};
  const int64_t chains = planes_.count * groups_.count();
  return {chains, flops() / double(chains)};
}

Items BackwardTask::row_items() const {
  if (by_class_ || !args_.grad_query.data) return {};
  return {wave_classes() * plane_row_items(), double(kGradRows * p_.head_dim * parts_), rounds()};
}

Items BackwardTask::head_items() const {
  if (by_class_ || !wants_heads()) return {};
  return {wave_classes(), double(planes_.rows * p_.head_dim_v), rounds()};
}

Items BackwardTask::mask_items() const {
  if (groups_.count() == 1) return {};
  return {planes_.count, double(groups_.count() * p_.seqlen_q * p_.seqlen_k)};
}

void BackwardTask::run(int64_t index, int64_t round, void* workspace) const {
  if (by_class_) return run_group(index / groups_.count(), index % groups_.count(), workspace);
  // Under is_causal the first keys are seen by the most rows, so the first splits of all classes go
  // first.
  const int64_t classes = wave_classes();
  const Turn its_turn = turn(p_.is_causal ? index % classes : index / splits_, round);
  const int64_t split = p_.is_causal ? index / classes : index % splits_;
  if (its_turn.plane >= 0) run_split(args_, its_turn.plane, its_turn.parts, split, workspace);
}

void BackwardTask::run_group(int64_t its_class, int64_t group, void* workspace) const {
  const int64_t groups = groups_.count();
  Arena arena(static_cast<char*>(workspace) + kernel_bytes_);
  const Parts parts = take_parts(arena);
  groups_.clear(group, its_class);
  for (int64_t position = sharing_.positions() * group / groups;
       position < sharing_.positions() * (group + 1) / groups; ++position) {
    const int64_t plane = sharing_.plane(its_class, position);
    for (int64_t split = 0; split < splits_; ++split)
      run_split(groups_.args(group), plane, parts, split, workspace);
    finish_plane_rows(plane, parts, 0, planes_.rows);
    finish_plane_heads(plane, parts);
  }
}

void BackwardTask::run_split(const BackwardArgs& args, int64_t plane, const Parts& parts,
                             int64_t split, void* workspace) const {
  BackwardItem item{plane / p_.kv_heads,
                    plane % p_.kv_heads,
                    split * split_keys_,
                    std::min(p_.seqlen_k, (split + 1) * split_keys_),
                    has_sums() ? parts.sums : nullptr,
                    split > 0 && parts_ == 0,
                    split == 0};
  if (parts_ && split > 0) item.partial_grad_query = parts.grad_query + (split - 1) * part_bytes();
  if (args.grad_alibi_slopes.data) item.grad_slopes = parts.slopes + split * p_.group();
  for (int m = 0; m < kMasks; ++m)
    if (args.grad_masks[m].queries.data)
      item.grad_mask_rows[m] = parts.mask_rows[m] + split * planes_.rows;
  (args.direction ? kernels_.double_backward : kernels_.backward)(p_, args, item, workspace);
}

void BackwardTask::finish_rows(int64_t index, int64_t round) const {
  const Turn its_turn = turn(index / plane_row_items(), round);
  const int64_t row = index % plane_row_items() * kGradRows;
  if (its_turn.plane >= 0)
    finish_plane_rows(its_turn.plane, its_turn.parts, row, std::min(planes_.rows, row + kGradRows));
}

void BackwardTask::finish_plane_rows(int64_t plane, const Parts& parts, int64_t begin,
                                     int64_t end) const {
  if (!args_.grad_query.data) return;
  kernels_.finish_grad_query(p_, args_,
                             {plane / p_.kv_heads, plane % p_.kv_heads, begin, end, split_keys_,
                              parts_, parts.grad_query, has_sums() ? parts.sums : nullptr});
}

void BackwardTask::finish_heads(int64_t index, int64_t round) const {
  const Turn its_turn = turn(index, round);
  if (its_turn.plane >= 0) finish_plane_heads(its_turn.plane, its_turn.parts);
}

void BackwardTask::finish_plane_heads(int64_t plane, const Parts& parts) const {
  if (!wants_heads()) return;
  const int64_t batch = plane / p_.kv_heads, first = plane % p_.kv_heads * p_.group();
  const auto add_splits = [&](const double* sums, int64_t step) {
    double sum = 0;
    for (int64_t s = 0; s < splits_; ++s) sum += sums[s * step];
    return sum;
  };
  for (int64_t g = 0; g < p_.group(); ++g) {
    if (args_.grad_alibi_slopes.data)
      *qkv::plane<double>(p_, args_.grad_alibi_slopes, batch, first + g) =
          add_splits(parts.slopes + g, p_.group());
    for (int m = 0; m < kMasks; ++m) {
      const Output& sums = args_.grad_masks[m].queries;
      for (int64_t i = 0; i < p_.seqlen_q && sums.data; ++i)
        store_row(p_, sums, batch, first + g, i,
                  add_splits(parts.mask_rows[m] + i * p_.group() + g, planes_.rows));
    }
    if (args_.grad_sinks.data) grad_sink(p_, args_, batch, first + g);
  }
}

}  // namespace qkv
