// Makes the maps of a problem's masks and spans (common/mask_map.h).
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "common/mask_map.h"
#include "draw_map.h"

namespace qkv {

// The problem of a call, with the maps of what it hides; where nothing but positions hides
// anything, the caller's own.
class MappedProblem {
 public:
  // Reads the masks. Throws std::bad_alloc if there is no memory for the maps.
  explicit MappedProblem(const Problem& p);
  MappedProblem(const MappedProblem&) = delete;
  const Problem& operator*() const { return own_ ? *own_ : p_; }

 private:
  // What one batch item and one query head see of a mask: rows [row, row + rows) of all maps.
  struct Piece {
    int which;  // the number of the map
    int64_t batch, head, row, rows;
  };

  void lay_out(int which, const Strides& mask);
  void add_piece(int which, int64_t batch, int64_t head);
  int64_t lay_out_squares();
  template <class M>
  MaskRows<M> rows_of(const Problem& item, const Piece& piece, int64_t row, int64_t cols) const;
  void draw_row(int64_t row);

  const Problem& p_;
  std::optional<Problem> own_;
  MaskMaps maps_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> item_rows_[kMaps];
  int64_t row_count_ = 0;
  std::unique_ptr<MapRow[]> rows_;
  std::unique_ptr<MapSquare[]> squares_;
};

}  // namespace qkv
