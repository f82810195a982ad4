#include "backward_task.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace qkv {
namespace {

// The most bytes of sums of keys that an item of the kernel adds to: they stay in the second-level
// cache while row after row passes by.
constexpr int64_t kCachedBytes = int64_t(192) << 10;
constexpr int64_t kFewestKeys = 256;
// Into how many bands of strips a plane is cut, for each thread that it gets and in all, if there
// are as many strips: so many cells can run at the same time, or half of them where is_causal hides
// the others. Cells differ in size, and a thread that waits for another one takes up time, too.
constexpr double kWidthPerThread = 1.5, kMoreWidth = 3;

// The most bytes of memory for the sums of planes, which the jobs of a call divide among them; or
// one in kSumShare of the gradients' own bytes, if that is more. One plane's sums are had in any
// case. Beside them each thread has a workspace, of which it touches some 0.1 (D = 64) to 0.4 MiB
// (D = 256).
constexpr int64_t kMostSumBytes = int64_t(20) << 20;
constexpr int64_t kSumShare = 5;

// Whether the kernels have to run. Only the gradient of the sinks can do without them.
bool wants_kernels(const BackwardArgs& a) {
  for (int n = 0; n < kHeadNumbers; ++n)
    if (is_sum_over_keys(n) && a.grad_by_head[n].data) return true;
  return a.grad_query.data || a.grad_key.data || a.grad_value.data || a.grad_tables ||
         std::any_of(a.grad_masks.begin(), a.grad_masks.end(), [](const GradMask& grad) {
           return grad.each.data || grad.keys.data || grad.queries.data;
         });
}

}  // namespace

BackwardTask::BackwardTask(const Problem& call, const BackwardArgs& args, const Stretch& stretch,
                           const Problem& item)
    : p_(call),
      args_(args),
      stretch_(stretch),
      kernels_(kernels_for(p_, args)),
      grid_(item, item.plane_rows(), Sharing::within_groups(args), kernels_),
      tables_(p_, args, stretch, grid_.parts(), grid_.most_bands(),
              !Sharing::between_planes(p_, args, stretch)),
      sharing_(p_, args, stretch, tables_.are_wanted() ? tables_.planes() : 0),
      sums_(item, args_, kernels_, grid_),
      planes_(stretch.count * p_.kv_heads),
      rows_(item.plane_rows()),
      keys_(item.seqlen_k),
      plane_flops_(Planes(item, stretch.count, args.direction ? 10 : 5).flops),
      runs_kernels_(wants_kernels(args)),
      groups_(p_, args, sharing_, grid_.width() > 2) {
  const int64_t key_bytes = (p_.head_dim + p_.head_dim_v) * size_of(compute_type(p_.dtype));
  const int64_t keys = std::max(kFewestKeys, kCachedBytes / std::max<int64_t>(1, key_bytes));
  const Strips& strips = grid_.strips();
  const int64_t calls = grid_.is_short() ? 1 : ceil_div(strips.count * strips.keys, keys);
  most_keys_ = ceil_div(strips.count, calls) * strips.keys;
  // Where rows are few, and where planes are many, strips of keys are long.
  if (strips.keys >= 2 * keys) most_keys_ = strip_size(strips.keys, strips.keys / keys, kStripKeys);
}

void BackwardTask::plan(const Team& team) {
  // Without rows or keys there are no cells.
  if (team.threads == 1 || flops() == 0 || groups_.count() > 1) return plan_by_class();
  const int64_t most_sums =
      std::max(int64_t(double(kMostSumBytes) * flops() / team.flops), gradient_bytes() / kSumShare);
  const int64_t bytes = std::max<int64_t>(1, sums_.bytes());
  // Whole classes are taken where they fill the threads evenly, or nearly so.
  const bool alone = flops() == team.flops;
  if (std::min<int64_t>(team.threads, classes()) * bytes <= most_sums &&
      (grid_.width() == 1 || team.pieces(flops() / double(classes()), 4) == 1 ||
       (alone && classes() % team.threads == 0)))
    return plan_by_class();
  waiting_planes_ = std::clamp<int64_t>(most_sums / bytes, 1, planes_);
  const auto together = double(std::min(classes(), wave()));
  const double threads = double(team.threads) * flops() / team.flops / together;
  const double wanted = (p_.is_causal ? 2 : 1) * kWidthPerThread * threads / double(grid_.parts());
  order_cells(tables_.are_wanted()
                  ? tables_.bands()
                  : std::min(int64_t(std::ceil(wanted + kMoreWidth)), grid_.most_bands()));
}

int64_t BackwardTask::gradient_bytes() const {
  return size_of(p_.dtype) * planes_ *
         (rows_ * p_.head_dim + keys_ * (p_.head_dim + p_.head_dim_v));
}

// Where not all planes have memory at the same time, half as many as have it begin together: so the
// next ones begin while these end.
int64_t BackwardTask::wave() const {
  return waiting_planes_ < planes_ ? ceil_div(waiting_planes_, 2) : planes_;
}

void BackwardTask::cut_parts(int64_t bands) {
  const ItemProblem item(p_, stretch_.first);
  for (int64_t part = 0; part < grid_.parts(); ++part)
    cells_.push_back(grid_.cells(*item, part, bands));
}

void BackwardTask::plan_by_class() {
  by_class_ = true;
  cut_parts(tables_.bands());
}

void BackwardTask::order_cells(int64_t bands) {
  cut_parts(bands);
  for (int32_t plane = 0; plane < planes_; ++plane)
    for (int32_t part = 0; part < grid_.parts(); ++part)
      for (int32_t cell = 0; cell < int32_t(cells_[part].size()); ++cell)
        turns_.push_back({plane, part, cell});
  plane_cells_ = int32_t(turns_.size()) / int32_t(planes_);
  // Planes that share a mask's gradient follow each other by one step.
  const int64_t together = wave();
  const auto step = [&](const Turn& turn) {
    return std::pair(turn.plane / together,
                     cells_[turn.part][turn.cell].step + turn.plane / classes());
  };
  std::stable_sort(turns_.begin(), turns_.end(), [&](const Turn& a, const Turn& b) {
    return std::pair(step(a), a.plane) < std::pair(step(b), b.plane);
  });
  steps_ = 1;
  for (size_t n = 1; n < turns_.size(); ++n) steps_ += step(turns_[n]) != step(turns_[n - 1]);
  progress_.reset(planes_, grid_.parts(), grid_.most_bands());
}

size_t BackwardTask::kernel_bytes() const {
  const int64_t keys = std::min(most_keys_, std::max<int64_t>(1, keys_));
  const BackwardItem largest{{}, 0, 0, 0, keys, 0, false, false, {}};
  return kernels_.backward(*ItemProblem(p_, stretch_.first), args_, largest, nullptr);
}

size_t BackwardTask::workspace_bytes() const {
  if (!runs_kernels_) return 0;
  Arena arena(nullptr);
  arena.take<char>(int64_t(kernel_bytes()));
  if (by_class_) sums_.take(arena);
  return arena.used();
}

void BackwardTask::take_memory(Arena& arena) {
  if (groups_.count() > 1) groups_.take_memory(arena);
  if (!by_class_) memory_ = arena.take<char>(waiting_planes_ * sums_.bytes());
}

Items BackwardTask::items() const {
  if (!runs_kernels_ && args_.grad_by_head[kSinks].data) return {planes_, double(rows_)};
  if (!runs_kernels_) return {};
  if (!by_class_) return {int64_t(turns_.size()), flops() / double(turns_.size()), steps_};
  const int64_t chains = classes() * groups_.count();
  return {chains, flops() / double(chains)};
}

Items BackwardTask::last_items() const {
  if (groups_.count() == 1) return {};
  return {classes(), double(groups_.count() * p_.seqlen_q * p_.seqlen_k)};
}

void BackwardTask::run(int64_t index, void* workspace) {
  if (!runs_kernels_) {
    const Plane own = stretch_.plane(p_, index);
    return sums_.finish_heads(*ItemProblem(p_, own.batch), own, {});
  }
  if (by_class_) return run_group(index / groups_.count(), index % groups_.count(), workspace);
  run_turn(turns_[size_t(index)], workspace);
}

void BackwardTask::run_group(int64_t its_class, int64_t group, void* workspace) const {
  const int64_t groups = groups_.count();
  Arena arena(workspace);
  const BackwardSums memory = sums_.take(arena);
  void* const own = arena.take<char>(0);
  groups_.clear(group, its_class);
  const int64_t begin = sharing_.positions() * group / groups;
  const int64_t end = sharing_.positions() * (group + 1) / groups;
  const auto plane = [&](int64_t of_class, int64_t position) {
    return stretch_.plane(p_, sharing_.plane(of_class, position));
  };
  for (int64_t position = begin; position < end; ++position) {
    // Most often a thread goes on with the next class.
    std::optional<Plane> next;
    if (position + 1 < end)
      next = plane(its_class, position + 1);
    else if (its_class + 1 < classes())
      next = plane(its_class + 1, begin);
    run_plane(groups_.args(group), plane(its_class, position), next && !p_.spans ? &*next : nullptr,
              memory, own);
  }
}

void BackwardTask::run_plane(const BackwardArgs& args, const Plane& plane, const Plane* next,
                             const BackwardSums& memory, void* workspace) const {
  const ItemProblem item(p_, plane.batch);
  const BackwardSums first = sums_.of_part(*item, plane, 0, memory);
  for (int64_t part = 0; part < grid_.parts(); ++part) {
    std::optional<BackwardSums> its;
    if (part > 0) its = sums_.of_part(*item, plane, part, memory);
    for (const Cell& cell : cells_[part]) {
      run_cell(*item, args, plane, part, cell, its ? *its : first, workspace, next);
      if (ends_rows(cell) && part + 1 == grid_.parts())
        sums_.finish_rows(*item, plane, grid_.rows(cell.rows), first);
    }
  }
  sums_.finish_heads(*item, plane, memory);
}

void BackwardTask::run_cell(const Problem& p, const BackwardArgs& args, const Plane& plane,
                            int64_t part, const Cell& cell, const BackwardSums& sums,
                            void* workspace, const Plane* next) const {
  const int64_t number = (plane.batch - stretch_.first) * p.kv_heads + plane.kv_head;
  void* const tables = tables_.sum(number, part, cell.row);
  const Range keys = grid_.keys(part, cell.keys);
  if (cell.row_rank == 0) sums_.clear_rows(sums, grid_.rows(cell.rows));
  if (cell.key_rank == 0) sums_.clear_keys(sums, keys);
  const bool completes = ends_rows(cell) && grid_.parts() == 1;
  grid_.for_each_rectangle(p, cell, part, most_keys_, [&](const Rectangle& of) {
    kernels_.backward(
        p, args,
        {plane, of.rows.begin, of.rows.end, of.keys.begin, of.keys.end, grid_.strips().keys,
         grid_.strips().descends, completes && of.ends_rows, sums, tables,
         of.rows.end - of.rows.begin == rows_ && of.keys.end - of.keys.begin == keys_ ? next
                                                                                      : nullptr},
        workspace);
  });
  if (cell.key_rank + 1 == cell.key_cells) sums_.finish_keys(p, plane, keys, sums);
}

void BackwardTask::run_turn(const Turn& turn, void* workspace) {
  const Cell& cell = cells_[turn.part][turn.cell];
  if (turn.plane >= waiting_planes_) wait_for(progress_.is_done(turn.plane - waiting_planes_), 1);
  // The plane before it, of the same class: as many of its cells, or all that add to the same sum.
  const bool share_tables = tables_.are_wanted() && tables_.planes() < planes_;
  if (turn.plane >= classes())
    wait_for(progress_.rows(turn.plane - classes(), turn.part, cell.row),
             share_tables ? cell.row_cells : cell.row_rank + 1);
  Number& rows = progress_.rows(turn.plane, turn.part, cell.row);
  Number& keys = progress_.keys(turn.plane, turn.part, cell.key);
  wait_for(rows, cell.row_rank);
  wait_for(keys, cell.key_rank);

  const Plane own =
      stretch_.plane(p_, sharing_.plane(turn.plane % classes(), turn.plane / classes()));
  const ItemProblem item(p_, own.batch);
  Arena arena(memory_ + turn.plane % waiting_planes_ * sums_.bytes());
  const BackwardSums memory = sums_.take(arena);
  run_cell(*item, args_, own, turn.part, cell, sums_.of_part(*item, own, turn.part, memory),
           workspace);
  advance(rows, cell.row_rank + 1);
  advance(keys, cell.key_rank + 1);

  if (ends_rows(cell) && add_one(progress_.row_parts(turn.plane, cell.row)) == grid_.parts())
    sums_.finish_rows(*item, own, grid_.rows(cell.rows), sums_.of_part(*item, own, 0, memory));
  if (add_one(progress_.cells(turn.plane)) < plane_cells_) return;
  sums_.finish_heads(*item, own, memory);
  advance(progress_.is_done(turn.plane), 1);
}

}  // namespace qkv
