#include "tensors/documents.h"

#include <limits>

#include "tensors/indices.h"
#include "tensors/problem.h"

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

// The rows of a view, in elements of `size` bytes, from `rows` on.
template <class View>
void skip_rows(View& view, int64_t rows, int64_t size) {
  skip(view, rows, view.strides.row, size);
}

Problem cut(const Problem& whole, const Document& document, int64_t index) {
  const int64_t size = size_of(whole.dtype);
  Problem p = whole;
  p.seqlen_q = document.seqlen_q;
  p.seqlen_k = document.seqlen_k;
  p.dropout_seed = whole.seed_of(index);
  p.dropout_batch = whole.dropout_number(index);
  p.dropout_seeds = nullptr;
  skip_rows(p.query, document.query_begin, size);
  skip_rows(p.key, document.key_begin, size);
  skip_rows(p.value, document.key_begin, size);
  skip_rows(p.alibi_slopes, index, sizeof(double));
  skip_rows(p.sinks, index, sizeof(double));
  for (Mask& mask : p.masks) skip_items(mask.input, index, size_of(mask.type));
  if (document.seqlen_k == 0) p.masks = {};  // which may have fewer rows than the document
  return p;
}

// The output and the log-sum-exp, and their tangents, if any, of queries that are in no document.
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

}  // namespace

Documents documents_of(const Call& call, const Sizes<int64_t>& sizes) {
  const Argument cu_seq_k = call.has(arg::cu_seq_k) ? arg::cu_seq_k : arg::cu_seq_q;
  const auto queries = boundaries_of(call, arg::cu_seq_q, "query", sizes.seqlen_q);
  const auto keys = boundaries_of(call, cu_seq_k, "key", sizes.seqlen_k);
  std::vector<int64_t> used;
  if (call.has(arg::seqused_k)) used = values_of(call[arg::seqused_k]);

  Documents documents;
  documents.query_begin = queries.front();
  documents.query_end = queries.back();
  documents.covers_keys = keys.front() == 0 && keys.back() == sizes.seqlen_k;
  documents.all.reserve(sizes.documents);
  for (int64_t i = 0; i < sizes.documents; ++i) {
    const int64_t seqlen_q = queries[i + 1] - queries[i], length = keys[i + 1] - keys[i];
    const int64_t seqlen_k = used.empty() ? length : used[i];
    TORCH_CHECK(0 <= seqlen_k && seqlen_k <= length, call.title(), ": seqused_k[", i, "] is ",
                seqlen_k, ", but document ", i, " has ", length, " keys; expected 0 to ", length);
    documents.covers_keys &= length == 0 || (seqlen_q > 0 && seqlen_k == length);
    check_masks_cover(call, i, seqlen_q, seqlen_k);
    documents.all.push_back({queries[i], seqlen_q, keys[i], seqlen_k});
  }
  return documents;
}

Documents paged_documents_of(const Call& call, const Sizes<int64_t>& sizes) {
  const auto queries = boundaries_of(call, arg::cu_seq_q, "query", sizes.seqlen_q);
  const auto used = values_of(call[arg::seqused_k]);
  Documents documents;
  documents.query_begin = queries.front();
  documents.query_end = queries.back();
  documents.all.reserve(sizes.documents);
  for (int64_t i = 0; i < sizes.documents; ++i) {
    TORCH_CHECK(used[i] >= 0, call.title(), ": seqused_k[", i, "] is ", used[i],
                ", but 0 or more is expected");
    check_masks_cover(call, i, queries[i + 1] - queries[i], used[i]);
    documents.all.push_back({queries[i], queries[i + 1] - queries[i], 0, used[i]});
  }
  return documents;
}

void attention_forward(const Documents& documents, const Problem& whole,
                       const ForwardResult& result, const Tensors& tensors,
                       c10::ArrayRef<Pages> pages) {
  std::vector<ForwardJob> jobs;
  jobs.reserve(documents.all.size());
  for (size_t i = 0; i < documents.all.size(); ++i) {
    if (documents.all[i].seqlen_q == 0) continue;
    jobs.push_back(cut(whole, result, documents.all[i], int64_t(i)));
    if (!pages.empty()) jobs.back().problem.pages = pages[i];
  }
  fill_gaps(documents, whole.seqlen_q, tensors);
  if (whole.heads > 0) attention_forward(jobs);
}

void attention_jvp(const Documents& documents, const Problem& whole, const JvpArgs& args,
                   const JvpResult& result, const Tensors& tensors) {
  std::vector<JvpJob> jobs;
  jobs.reserve(documents.all.size());
  for (size_t i = 0; i < documents.all.size(); ++i)
    if (documents.all[i].seqlen_q > 0)
      jobs.push_back(cut(whole, args, result, documents.all[i], int64_t(i)));
  fill_gaps(documents, whole.seqlen_q, tensors);
  if (whole.heads > 0) attention_jvp(jobs);
}

ForwardJob cut(const Problem& whole, const ForwardResult& result, const Document& document,
               int64_t index) {
  const int64_t size = size_of(whole.dtype);
  ForwardJob job{cut(whole, document, index), result};
  skip_rows(job.result.output, document.query_begin, size);
  skip_rows(job.result.lse, document.query_begin, size_of(compute_type(whole.dtype)));
  return job;
}

namespace {

JvpArgs cut(DType dtype, JvpArgs args, const Document& document, int64_t index) {
  const int64_t size = size_of(dtype);
  skip_rows(args.query, document.query_begin, size);
  skip_rows(args.key, document.key_begin, size);
  skip_rows(args.value, document.key_begin, size);
  skip_rows(args.output, document.query_begin, size);
  skip_rows(args.alibi_slopes, index, sizeof(double));
  skip_rows(args.sinks, index, sizeof(double));
  for (Mask& mask : args.masks) skip_items(mask.input, index, size_of(mask.type));
  return args;
}

}  // namespace

BackwardDirection cut(const Problem& whole, const BackwardDirection& direction,
                      const Document& document, int64_t index) {
  BackwardDirection own{cut(whole.dtype, direction.along, document, index), direction.output_jvp,
                        direction.lse_jvp};
  skip_rows(own.output_jvp, document.query_begin, size_of(whole.dtype));
  skip_rows(own.lse_jvp, document.query_begin, size_of(compute_type(whole.dtype)));
  return own;
}

JvpJob cut(const Problem& whole, const JvpArgs& args, const JvpResult& result,
           const Document& document, int64_t index) {
  const int64_t size = size_of(whole.dtype), lse_size = size_of(compute_type(whole.dtype));
  JvpJob job{cut(whole, document, index), cut(whole.dtype, args, document, index), result};
  for (Output* output : {&job.result.output, &job.result.output_jvp})
    skip_rows(*output, document.query_begin, size);
  for (Output* lse : {&job.result.lse, &job.result.lse_jvp})
    skip_rows(*lse, document.query_begin, lse_size);
  return job;
}

BackwardJob cut(const Problem& whole, const BackwardArgs& args, const Document& document,
                int64_t index) {
  const int64_t size = size_of(whole.dtype);
  BackwardJob job{cut(whole, document, index), args};
  BackwardArgs& a = job.args;
  for (Input* input : {&a.output, &a.grad_output}) skip_rows(*input, document.query_begin, size);
  for (Input* input : {&a.lse, &a.grad_lse})
    skip_rows(*input, document.query_begin, size_of(compute_type(whole.dtype)));
  skip_rows(a.grad_query, document.query_begin, size);
  skip_rows(a.grad_key, document.key_begin, size);
  skip_rows(a.grad_value, document.key_begin, size);
  skip_rows(a.grad_alibi_slopes, index, sizeof(double));
  skip_rows(a.grad_sinks, index, sizeof(double));
  for (int m = 0; m < kMasks; ++m) {
    GradMask& grad = a.grad_masks[m];
    skip_items(grad.each, index, whole.masks[m].type == MaskType::f64 ? 8 : 4);
    for (Output* sums : {&grad.keys, &grad.queries})
      skip_items(*sums, index, size_of(compute_type(whole.dtype)));
  }
  if (document.seqlen_k == 0) a.grad_masks = {};  // they are 0 already
  return job;
}

}  // namespace qkv
