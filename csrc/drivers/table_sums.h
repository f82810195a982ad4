// The gradient of a score program's tables (BackwardArgs::grad_tables), to whose elements any pair
// may add. Planes, and bands of the rows of a plane, add to sums of their own, in the order in
// which a band meets its keys; at the end these are added up in their order. How many there are
// follows from the shape alone, so that the gradient has the same bits for any number of threads.
#pragma once

#include <vector>

#include "attention.h"
#include "stretch.h"

namespace qkv {

class TableSums {
 public:
  // Of the planes of one stretch, whose keys have `parts` parts, and whose rows can be cut into
  // most_bands bands. Planes may have one sum together only if may_share: then they take turns.
  TableSums(const Problem& p, const BackwardArgs& args, const Stretch& stretch, int64_t parts,
            int64_t most_bands, bool may_share);

  bool are_wanted() const { return elements_ > 0; }
  // Planes n and n + planes() have one sum together.
  int64_t planes() const { return planes_; }
  int64_t bands() const { return bands_; }

  // The sum of one band, in double if ScoreProgram::sums_in_double; null: not wanted.
  void* sum(int64_t plane, int64_t part, int64_t band) const;
  // Adds all sums to the gradient.
  void add() const;

 private:
  template <class T, class Sum>
  void add_as() const;
  int64_t sums() const { return planes_ * parts_ * bands_; }

  const Problem& p_;
  const BackwardArgs& args_;
  Stretch stretch_;
  int64_t elements_ = 0, element_ = 0;  // of a sum, and the bytes of one
  int64_t planes_ = 1, parts_ = 1, bands_ = 1;
  mutable std::vector<char> memory_;  // [planes, parts, bands, elements]
};

// Sets the gradient to 0.
void clear_grad_tables(const Problem& p, const BackwardArgs& args);

}  // namespace qkv
