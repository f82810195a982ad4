// A packed batch: documents of any lengths as one Problem with spans, and each as a Problem of its
// own.
#pragma once

#include <array>
#include <deque>
#include <vector>

#include "jvp_workload.h"

namespace qkv::test {

using Lengths = std::vector<std::pair<int64_t, int64_t>>;  // of queries and keys of each document

// A case for each document, with numbers of its own.
inline std::vector<Case> documents(Case c, const Lengths& lengths) {
  std::vector<Case> all;
  for (const auto& [L, S] : lengths) {
    c.L = L, c.S = S;
    all.push_back(c);
    ++c.seed;
  }
  return all;
}

// A tensor [item, head, row, col] of a packed batch, and where each document has its part of it, a
// block [heads, rows, cols]. Inputs hold NaN outside of these parts, outputs bytes that must stay
// as they are.
class PackedTensor {
 public:
  // The place of a document's first element.
  struct Place {
    int64_t item, row, col;
  };

  PackedTensor() = default;
  PackedTensor(Tensor memory, std::vector<Place> places, std::vector<Sizes> parts)
      : memory_(std::move(memory)), places_(std::move(places)), parts_(std::move(parts)) {}

  explicit operator bool() const { return bool(memory_); }
  const Tensor& memory() const { return memory_; }
  Input input() const { return memory_.input(); }
  Output output() const { return memory_.output(); }

  // Writes a number to every element, whether it is one of a document or not.
  template <class F>
  void fill(F next) {
    memory_.fill(next);
  }
  // The numbers of document n, row-major.
  void write(size_t n, const std::vector<double>& values);
  std::vector<double> values(size_t n) const;
  // Fails the test if anything but elements of documents was written.
  void expect_nothing_else_written() const;

 private:
  // Calls f(offset) for every element of document n, in row-major order.
  template <class F>
  void for_each_of(size_t n, F f) const;

  Tensor memory_;
  std::vector<Place> places_;
  std::vector<Sizes> parts_;
};

// How the documents of a packed batch lie in memory.
struct Layout {
  // Whether they share a mask and its gradient: then each has the upper left corner of one mask.
  std::array<bool, kMasks> share_mask = {};
  int64_t key_items = 1;  // in how many batch items of keys and values they lie
  bool in_order = false;  // else documents are in any order in memory
  uint64_t seed = 1;      // of that order, and of the gaps between documents
};

class Packed {
 public:
  // The cases have no batch, and differ only in L, S and seed. Dropout has the first one's
  // dropout_batch and seeds; with own_seeds, other seeds for every three documents.
  Packed(std::vector<Case> cases, const Layout& layout);

  size_t size() const { return documents_.size(); }
  const JvpWorkload& document(size_t n) const { return documents_[n]; }
  JvpWorkload& document(size_t n) { return documents_[n]; }
  const Case& common() const { return documents_[0].c; }
  const Layout& layout() const { return layout_; }

  // The problem of all documents, and the directions of all.
  Problem problem(int num_threads) const;
  JvpArgs directions() const;
  Input grad_output() const { return grad_output_.input(); }
  Input grad_lse() const { return grad_lse_.input(); }

  // What a tensor has for each document.
  enum class Of { queries, keys, key_columns, pairs, rows, heads };
  // With `shared`, the documents have the same part of it.
  PackedTensor make(Of of, Type type, int64_t heads, int64_t cols, bool shared = false,
                    bool share_heads = false) const;

 private:
  void place_documents();
  PackedTensor pack(Of of, Tensor JvpWorkload::* which, bool shared = false);

  std::deque<JvpWorkload> documents_;  // a deque never moves its elements
  Layout layout_;
  std::vector<Span> spans_;
  int64_t query_rows_ = 0, key_rows_ = 0;  // of all tensors with rows for queries, or keys
  int64_t most_queries_ = 0, most_keys_ = 0;
  std::vector<int64_t> seeds_;
  PackedTensor query_, key_, value_, mask_, bias_, key_spans_, alibi_slopes_, sinks_;
  PackedTensor grad_output_, grad_lse_;
  PackedTensor query_jvp_, key_jvp_, value_jvp_, mask_jvp_, bias_jvp_, slopes_jvp_, sinks_jvp_;
};

// What a call makes of a packed batch: the results of each document, and GradMask::each of the
// masks that documents share, which are not among them.
struct PackedResults {
  std::vector<Results> documents;
  std::array<std::vector<double>, kMasks> sums;
};

// Run both passes, or those and the second derivatives; attention_hard; attention_jvp. Inputs are
// read-only meanwhile, and the test fails if anything but elements of documents is written.
PackedResults run(const Packed& packed, int num_threads);
PackedResults run_double(const Packed& packed, int num_threads);
// The forward pass alone, of a problem that was made of that of the packed batch.
std::vector<Results> run_forward(const Packed& packed, const Problem& problem);
std::vector<Results> run_hard(const Packed& packed, int num_threads);
std::vector<JvpResults> run_jvp(const Packed& packed, int num_threads);

// What run() should give: each document's results when it is alone, and what their backward passes
// add to the shared sums, one after the other.
PackedResults run_one_by_one(const Packed& packed);
// The shared sums as the reference makes them of each document alone, added up in double.
std::array<std::vector<double>, kMasks> true_sums(const Packed& packed,
                                                  const PackedResults& actual);

void expect_identical(const PackedResults& actual, const PackedResults& expected);

}  // namespace qkv::test
