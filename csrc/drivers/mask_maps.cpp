#include "mask_maps.h"

#include "stretch.h"
#include "threads/parallel.h"

namespace qkv {
namespace {

// About how many floating-point operations one core does in the time that a square of bytes takes,
// which is the cheapest one: 61 ns on a Zen 4 that does 117 of them in a nanosecond.
constexpr double kSquareFlops = 7000;

}  // namespace

MappedProblem::MappedProblem(const Problem& p) : p_(p) {
  if (!has_masks(p) || p.heads == 0) return;
  own_ = p;
  own_->maps = &maps_;
  int64_t first_rows[kMaps];
  for (int m = 0; m < kMaps; ++m) {
    first_rows[m] = row_count_;
    if (has_map(p, m)) lay_out(m, mask_of(p, m).strides);
  }
  rows_.reset(new MapRow[size_t(row_count_)]);
  const int64_t square_count = lay_out_squares();
  for (int m = 0; m < kMaps; ++m) {
    if (!has_map(p, m)) continue;
    maps_.of[m].rows = rows_.get() + first_rows[m];
    if (p.spans) maps_.of[m].item_rows = item_rows_[m].data();
  }
  if (row_count_ == 0) return;
  const double flops = kSquareFlops * double(square_count);
  Threads threads{usable_threads(p.num_threads, flops), 1};
  threads.working = int(std::min<int64_t>(threads.team, row_count_));
  parallel_phases(threads, 1,
                  {{[&](int64_t) { return Items{row_count_, flops / double(row_count_)}; },
                    [&](const Item& item) { draw_row(item.index); }}});
}

// Adds the pieces of a mask: one for all batch items and heads that read the same memory. Items of
// different sizes have a piece each.
void MappedProblem::lay_out(int which, const Strides& mask) {
  MaskMap& map = maps_.of[which];
  map.strides.row = mask.row != 0;
  // With Problem::spans, that it is not 0 is all that counts.
  map.strides.head = mask.head ? std::max<int64_t>(1, map.rows_of(p_)) : 0;
  int64_t step = map.rows_of(p_) * (mask.head ? p_.heads : 1);
  for (int d = p_.batch_rank - 1; d >= 0 && !p_.spans; --d) {
    map.strides.batch[d] = mask.batch[d] ? step : 0;
    if (mask.batch[d]) step *= p_.batch_sizes[d];
  }
  const int64_t first = row_count_;
  for (int64_t b = 0; b < p_.batch(); ++b) {
    if (p_.spans) item_rows_[which].push_back(row_count_ - first);
    for (int64_t h = 0; h < (mask.head ? p_.heads : 1); ++h)
      // Pieces ascend with their batch item and head, so what is not new lies before.
      if (p_.spans || first + plane_offset(p_, map.strides, b, h) == row_count_)
        add_piece(which, b, h);
  }
}

void MappedProblem::add_piece(int which, int64_t batch, int64_t head) {
  const ItemProblem item(p_, batch);
  const int64_t rows = maps_.of[which].rows_of(*item);
  pieces_.push_back({which, batch, head, row_count_, rows});
  row_count_ += rows;
}

// Says in which columns each row has squares, and makes these; returns how many there are.
int64_t MappedProblem::lay_out_squares() {
  int64_t count = 0;
  for (const Piece& piece : pieces_) {
    const ItemProblem item(p_, piece.batch);
    const bool has_rows = mask_of(*item, piece.which).strides.row;
    for (int64_t row = 0; row < piece.rows; ++row) {
      Range keys{0, item->seqlen_k};
      if (has_rows && hides_positions(*item)) {
        const int64_t last = std::min((row + 1) * kMapQueries, item->seqlen_q) - 1;
        keys = {key_begin(*item, row * kMapQueries), key_end(*item, last)};
      }
      if (piece.which == kSpansMap) {
        const int64_t spans = item->key_spans.count;
        keys = keys_of_spans(rows_of<int32_t>(*item, piece, row, 2 * spans), spans, keys);
      }
      rows_[piece.row + row].keys = keys.is_empty() ? Range{} : keys;  // until it is drawn
      const Range columns = columns_of(rows_[piece.row + row].keys);
      rows_[piece.row + row].first_column = columns.begin;
      count += columns.end - columns.begin;
    }
  }
  squares_.reset(new MapSquare[size_t(count)]);
  MapSquare* squares = squares_.get();
  for (int64_t row = 0; row < row_count_; ++row) {
    rows_[row].squares = squares;
    const Range columns = columns_of(rows_[row].keys);
    squares += columns.end - columns.begin;
  }
  return count;
}

// Of the queries of one row of a piece, what the mask has: so many columns.
template <class M>
MaskRows<M> MappedProblem::rows_of(const Problem& item, const Piece& piece, int64_t row,
                                   int64_t cols) const {
  const Input& mask = mask_of(item, piece.which);
  const int64_t begin = row * kMapQueries;
  // A mask without queries has no memory.
  const int64_t queries = std::min(mask.strides.row ? kMapQueries : 1, item.seqlen_q - begin);
  return {plane<M>(item, mask, piece.batch, piece.head) + begin * mask.strides.row, queries,
          mask.strides.row, cols, mask.strides.col};
}

void MappedProblem::draw_row(int64_t row) {
  const Piece& piece = *std::prev(std::upper_bound(
      pieces_.begin(), pieces_.end(), row, [](int64_t x, const Piece& of) { return x < of.row; }));
  const ItemProblem item(p_, piece.batch);
  const int64_t keys = item->seqlen_k, at = row - piece.row;
  const Range columns = columns_of(rows_[row].keys);
  // Those of the row, which all others only read.
  MapSquare* const squares = squares_.get() + (rows_[row].squares - squares_.get());
  if (piece.which == kSpansMap)
    draw_spans(rows_of<int32_t>(*item, piece, at, 2 * item->key_spans.count), item->key_spans.count,
               keys, columns, squares);
  else
    with_elements(item->masks[piece.which].type, [&](auto element) {
      draw_squares(rows_of<decltype(element)>(*item, piece, at, keys), columns, squares);
    });
  rows_[row].keys = keys_of(squares, columns, keys);
}

}  // namespace qkv
