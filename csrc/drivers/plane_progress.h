// How far the cells of the planes of a backward pass are (cells.h).
#pragma once

#include <memory>

#include "threads/progress.h"

namespace qkv {

class PlaneProgress {
 public:
  // Of `planes` planes, each of so many parts, and of each part so many bands of strips.
  void reset(int64_t planes, int64_t parts, int64_t bands) {
    parts_ = parts, bands_ = bands;
    step_ = 2 * parts * bands + bands + 2;
    numbers_ = std::make_unique<Number[]>(size_t(planes * step_));  // zeros
  }

  // How many cells of a band of rows, or keys, of a part are done.
  Number& rows(int64_t plane, int64_t part, int64_t band) const {
    return at(plane)[(part * bands_ + band) * 2];
  }
  Number& keys(int64_t plane, int64_t part, int64_t band) const {
    return at(plane)[(part * bands_ + band) * 2 + 1];
  }
  // In how many parts all cells of a band of rows are done.
  Number& row_parts(int64_t plane, int64_t band) const {
    return at(plane)[parts_ * bands_ * 2 + band];
  }
  // How many cells of the plane are done, and whether all that follows them is.
  Number& cells(int64_t plane) const { return at(plane)[step_ - 2]; }
  Number& is_done(int64_t plane) const { return at(plane)[step_ - 1]; }

 private:
  Number* at(int64_t plane) const { return &numbers_[size_t(plane * step_)]; }

  int64_t parts_ = 0, bands_ = 0, step_ = 0;
  std::unique_ptr<Number[]> numbers_;
};

}  // namespace qkv
