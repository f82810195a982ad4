// Packed batches: every document is a Problem of its own, on rows of the same tensors.
#pragma once

#include <vector>

#include "attention_double_backward.h"
#include "call/check.h"

namespace qkv {

struct Document {
  int64_t query_begin, seqlen_q;
  int64_t key_begin, seqlen_k;  // the keys that take part
};

struct Documents {
  std::vector<Document> all;
  int64_t query_begin = 0, query_end = 0;  // queries before and after are in no document
  bool covers_keys = true;                 // every key takes part in a document that has queries
};

// Throws c10::Error unless cu_seq_q, cu_seq_k and seqused_k describe documents.
Documents documents_of(const Call& call, const Sizes<int64_t>& sizes);
// Likewise with keys in pages: of any number, seqused_k, from page 0 on.
Documents paged_documents_of(const Call& call, const Sizes<int64_t>& sizes);

// gap(begin, end) for the queries that are in no document.
template <class Gap>
void for_each_gap(const Documents& documents, int64_t seqlen_q, const Gap& gap) {
  if (documents.query_begin > 0) gap(0, documents.query_begin);
  if (documents.query_end < seqlen_q) gap(documents.query_end, seqlen_q);
}

// Every document by itself, with its `pages`, if any; queries in none get output 0, lse -inf, and
// tangents of 0. `tensors` are what `result` points into, in its order; undefined: null.
void attention_forward(const Documents& documents, const Problem& whole,
                       const ForwardResult& result, const Tensors& tensors,
                       c10::ArrayRef<Pages> pages = {});
void attention_jvp(const Documents& documents, const Problem& whole, const JvpArgs& args,
                   const JvpResult& result, const Tensors& tensors);

// `whole` cut down to document number `index`.
ForwardJob cut(const Problem& whole, const ForwardResult& result, const Document& document,
               int64_t index);
JvpJob cut(const Problem& whole, const JvpArgs& args, const JvpResult& result,
           const Document& document, int64_t index);
BackwardDirection cut(const Problem& whole, const BackwardDirection& direction,
                      const Document& document, int64_t index);
BackwardJob cut(const Problem& whole, const BackwardArgs& args, const Document& document,
                int64_t index);

}  // namespace qkv
