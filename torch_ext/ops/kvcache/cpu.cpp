// Dispatch key CPU: attention_with_kvcache, varlen_attention_paged.
#include "ops/kvcache/append.h"
#include "tensors/copies.h"
#include "tensors/documents.h"
#include "tensors/layout.h"
#include "tensors/problem.h"

namespace qkv::ops {
namespace {

// Elements from one row of the caches, or block, to the next in a scale.
int64_t place_stride(const at::Tensor& scale) {
  return is_per_token(scale) ? scale.strides()[0] : 0;
}

// The scales of int8 keys and values; `head` is the dimension of these that has the heads.
void bind_scales(const Call& call, int64_t head, Problem& p) {
  for (const auto& [input, which] :
       {std::pair(&p.key_scale, arg::key_scale), {&p.value_scale, arg::value_scale}}) {
    const at::Tensor& scale = call[which];
    if (!scale.defined()) continue;
    input->data = scale.const_data_ptr();
    if (is_per_token(scale)) {
      input->strides.head = scale.strides()[head];
      input->strides.row = scale.strides()[3 - head];
    } else if (scale.numel() > 1) {
      input->strides.head = scale.strides()[0];
    }
  }
}

Pages pages_of(const Call& call, const BlockTable& table, int64_t n, int64_t block_size) {
  return {table[n],
          block_size,
          call[arg::key].strides()[0],
          call[arg::value].strides()[0],
          place_stride(call[arg::key_scale]),
          place_stride(call[arg::value_scale])};
}

// Batch item b alone. `whole` is the first one, `tensors` are what `result` points into.
ForwardJob item(const Call& call, const CacheRows& rows, const Problem& whole,
                const ForwardResult& result, const Tensors& tensors, int64_t b) {
  const at::Tensor &output = tensors[0], &lse = tensors[1];
  const CacheRow& row = rows.rows[b];
  const int64_t size = size_of(whole.dtype);
  ForwardJob job{whole, result};
  Problem& p = job.problem;
  p.seqlen_k = row.length + rows.new_rows - row.hidden;
  skip(p.query, b, call[arg::query].strides()[0], size);
  skip(p.alibi_slopes, b, p.alibi_slopes.strides.row, sizeof(double));
  skip(p.sinks, b, p.sinks.strides.row, sizeof(double));
  for (Mask& mask : p.masks) skip_items(mask.input, b, size_of(mask.type));
  skip(job.result.output, b, output.strides()[0], size);
  skip(job.result.lse, b, lse.strides()[0], lse.element_size());
  if (rows.table) {
    p.pages = pages_of(call, *rows.table, b, call[arg::key].sizes()[2]);
    return job;
  }
  const auto skip_rows = [&](Input& input, int64_t place, int64_t element) {
    skip(input, row.row, place, element);
    skip(input, row.hidden, input.strides.row, element);
  };
  for (const auto& [input, cache] :
       {std::pair(&p.key, &call[arg::key]), {&p.value, &call[arg::value]}})
    skip_rows(*input, cache->strides()[0], cache->element_size());
  skip_rows(p.key_scale, place_stride(call[arg::key_scale]), sizeof(float));
  skip_rows(p.value_scale, place_stride(call[arg::value_scale]), sizeof(float));
  return job;
}

void attend_to_rows(const Call& call, const Sizes<int64_t>& sizes, const CacheRows& rows,
                    const Tensors& results) {
  if (!is_aligned(call)) return attend_to_rows(*CopiedCall(call, aligned), sizes, rows, results);
  KernelCall kernel(call, sizes);
  bind_scales(call, 1, kernel.problem);
  ForwardResult result;
  kernel.bind(result.output, results[0], Dims::head_row_column);
  kernel.bind(result.lse, results[1], Dims::head_row);
  std::vector<ForwardJob> jobs;
  jobs.reserve(rows.rows.size());
  for (int64_t b = 0; b < sizes.batch[0]; ++b)
    jobs.push_back(item(call, rows, kernel.problem, result, results, b));
  attention_forward(jobs);
}

}  // namespace

Tensors kvcache_cpu(const Call& call) {
  const auto sizes = check_kvcache<int64_t>(call);
  const CacheRows rows = cache_rows(call, sizes);
  Tensors results = empty_results(call, sizes);
  if (appends(call)) append(call, rows, num_threads());
  if (results[1].numel() > 0) attend_to_rows(call, sizes, rows, results);
  return results;
}

Tensors paged_varlen_cpu(const Call& call) {
  const auto sizes = check_paged_varlen<int64_t>(call);
  if (!is_aligned(call)) return paged_varlen_cpu(*CopiedCall(call, aligned));
  const Documents documents = paged_documents_of(call, sizes);
  c10::SmallVector<int64_t, 16> lengths;
  for (const Document& document : documents.all) lengths.push_back(document.seqlen_k);
  const auto pool = call[arg::key].sizes();
  const BlockTable table(call.title(), call.name_of(arg::key), call[arg::block_table], pool[0],
                         pool[1], lengths);
  c10::SmallVector<Pages, 16> pages;
  for (size_t n = 0; n < lengths.size(); ++n) pages.push_back(pages_of(call, table, n, pool[1]));
  Tensors results = empty_results(call, sizes);
  KernelCall kernel(call, sizes);
  bind_scales(call, 2, kernel.problem);
  ForwardResult result;
  kernel.bind(result.output, results[0], Dims::head_row_column);
  kernel.bind(result.lse, results[1], Dims::head_row);
  attention_forward(documents, kernel.problem, result, results, pages);
  return results;
}

}  // namespace qkv::ops
