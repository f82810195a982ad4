// Packed batches: the documents are spans of the rows of one problem.
#pragma once

#include <vector>

#include "attention.h"
#include "call/check.h"

namespace qkv {

struct Documents {
  std::vector<Span> all;
  int64_t query_begin = 0, query_end = 0;  // queries before and after are in no document
  bool covers_keys = true;                 // every key takes part in a document
};

// Of a packed call; none of any other. Throws c10::Error unless cu_seq_q, cu_seq_k and seqused_k
// describe documents. With a block_table seqused_k alone says how many keys a document has, and its
// first key is that of its first page.
Documents documents_of(const Call& call, const Sizes<int64_t>& sizes);

// gap(begin, end) for the queries that are in no document.
template <class Gap>
void for_each_gap(const Documents& documents, int64_t seqlen_q, const Gap& gap) {
  if (documents.query_begin > 0) gap(0, documents.query_begin);
  if (documents.query_end < seqlen_q) gap(documents.query_end, seqlen_q);
}

// Queries that are in no document get output 0, lse -inf, and tangents of 0: `tensors` are the
// output and the lse of a packed call, and their tangents, if any; undefined: not wanted.
void fill_gaps(const Documents& documents, int64_t seqlen_q, const Tensors& tensors);

// run(problem) for the problem of a call, whose documents it gets if it is packed. `results` are as
// in fill_gaps.
template <class Run>
void run_on_rows(const Call& call, const Sizes<int64_t>& sizes, Problem& problem,
                 const Tensors& results, const Run& run) {
  const Documents documents = documents_of(call, sizes);
  if (call.is_packed()) fill_gaps(documents, sizes.seqlen_q, results);
  problem.spans = documents.all.empty() ? nullptr : documents.all.data();
  run(problem);
  problem.spans = nullptr;
}

}  // namespace qkv
