#include "tensors/documents.h"

#include <limits>

#include "tensors/indices.h"

namespace qkv {
namespace {

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const Indices indices(tensor);
  std::vector<int64_t> values(tensor.numel());
  for (size_t i = 0; i < values.size(); ++i) values[i] = indices[i];
  return values;
}

std::vector<int64_t> boundaries_of(const Call& call, Argument argument, const char* tensor,
                                   int64_t rows) {
  const std::vector<int64_t> ends = values_of(call[argument]);
  const char* name = call.name_of(argument);
  TORCH_CHECK(ends.front() >= 0, call.title(), ": ", name, " begins with ", ends.front(),
              ", but 0 or more is expected");
  for (size_t i = 1; i < ends.size(); ++i)
    TORCH_CHECK(ends[i - 1] <= ends[i], call.title(), ": ", name, " falls from ", ends[i - 1],
                " to ", ends[i], " at element ", i, ", but numbers that do not fall are expected");
  TORCH_CHECK(ends.back() <= rows, call.title(), ": ", name, " ends with ", ends.back(), ", but ",
              tensor, " has only ", rows, " rows");
  return ends;
}

}  // namespace

void fill_gaps(const Documents& documents, int64_t seqlen_q, const Tensors& tensors) {
  for_each_gap(documents, seqlen_q, [&](int64_t begin, int64_t end) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) continue;
      const bool is_output = i % 2 == 0;  // [T, H, Dv]; else [H, T]
      const double value = i == 1 ? -std::numeric_limits<double>::infinity() : 0;
      tensors[i].slice(is_output ? 0 : 1, begin, end).fill_(value);
    }
  });
}

Documents documents_of(const Call& call, const Sizes<int64_t>& sizes) {
  if (!call.is_packed()) return {};
  const bool is_paged = call.has(arg::block_table);
  const Argument cu_seq_k = call.has(arg::cu_seq_k) ? arg::cu_seq_k : arg::cu_seq_q;
  const auto queries = boundaries_of(call, arg::cu_seq_q, "query", sizes.seqlen_q);
  std::vector<int64_t> keys, used;
  if (!is_paged) keys = boundaries_of(call, cu_seq_k, "key", sizes.seqlen_k);
  if (call.has(arg::seqused_k)) used = values_of(call[arg::seqused_k]);

  Documents documents;
  documents.query_begin = queries.front();
  documents.query_end = queries.back();
  documents.covers_keys = !is_paged && keys.front() == 0 && keys.back() == sizes.seqlen_k;
  documents.all.reserve(sizes.documents);
  for (int64_t i = 0; i < sizes.documents; ++i) {
    const int64_t seqlen_q = queries[i + 1] - queries[i], key_begin = is_paged ? 0 : keys[i];
    const int64_t length = is_paged ? used[i] : keys[i + 1] - key_begin;
    const int64_t seqlen_k = used.empty() ? length : used[i];
    TORCH_CHECK(!is_paged || seqlen_k >= 0, call.title(), ": seqused_k[", i, "] is ", seqlen_k,
                ", but 0 or more is expected");
    TORCH_CHECK(0 <= seqlen_k && seqlen_k <= length, call.title(), ": seqused_k[", i, "] is ",
                seqlen_k, ", but document ", i, " has ", length, " keys; expected 0 to ", length);
    documents.covers_keys &= length == 0 || seqlen_k == length;
    check_masks_cover(call, i, seqlen_q, seqlen_k);
    documents.all.push_back({queries[i], seqlen_q, key_begin, seqlen_k, 0, nullptr});
  }
  return documents;
}

}  // namespace qkv
