// How far the cells of the planes of a backward pass are (cells.h).
#pragma once

#include <memory>

#include "threads/progress.h"

namespace qkv {

class PlaneProgress {
 public:
  // Of `planes` planes, each of so many parts, and of each part so many groups of strips.
  void reset(int64_t planes, int64_t parts, int64_t groups) {
    parts_ = parts, groups_ = groups;
    step_ = 2 * parts * groups + groups + 2;
    numbers_ = std::make_unique<Number[]>(size_t(planes * step_));  // zeros
  }

  // How many cells of a group of rows, or keys, of a part are done.
  Number& rows(int64_t plane, int64_t part, int64_t group) const {
    return at(plane)[(part * groups_ + group) * 2];
  }
  Number& keys(int64_t plane, int64_t part, int64_t group) const {
    return at(plane)[(part * groups_ + group) * 2 + 1];
  }
  // In how many parts all cells of a group of rows are done.
  Number& row_parts(int64_t plane, int64_t group) const {
    return at(plane)[parts_ * groups_ * 2 + group];
  }
  // How many cells of the plane are done, and whether all that follows them is.
  Number& cells(int64_t plane) const { return at(plane)[step_ - 2]; }
  Number& is_done(int64_t plane) const { return at(plane)[step_ - 1]; }

 private:
  Number* at(int64_t plane) const { return &numbers_[size_t(plane * step_)]; }

  int64_t parts_ = 0, groups_ = 0, step_ = 0;
  std::unique_ptr<Number[]> numbers_;
};

}  // namespace qkv
