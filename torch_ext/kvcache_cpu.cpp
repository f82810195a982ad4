// Dispatch key CPU: attention_with_kvcache, varlen_attention_paged.
#include <torch/library.h>

#include "copies.h"
#include "documents.h"
#include "kvcache_append.h"
#include "layout.h"
#include "ops.h"
#include "problem.h"

namespace qkv {
namespace {

Pages pages_of(const Forward& f, const BlockTable& table, int64_t n, int64_t block_size) {
  return {table[n], block_size, f.key().strides()[0], f.value().strides()[0]};
}

// Batch item b alone. `whole` is the first one, `tensors` are what `result` points into.
ForwardJob item(const Forward& f, const CacheRows& rows, const Problem& whole,
                const ForwardResult& result, const OutputAndLse& tensors, int64_t b) {
  const auto& [output, lse] = tensors;
  const CacheRow& row = rows.rows[b];
  const int64_t size = size_of(whole.dtype);
  ForwardJob job{whole, result};
  Problem& p = job.problem;
  p.seqlen_k = row.length + rows.new_rows - row.hidden;
  skip(p.query, b, f.query().strides()[0], size);
  skip(p.alibi_slopes, b, p.alibi_slopes.strides.row, sizeof(double));
  skip(p.sinks, b, p.sinks.strides.row, sizeof(double));
  skip(job.result.output, b, output.strides()[0], size);
  skip(job.result.lse, b, lse.strides()[0], lse.element_size());
  if (rows.table) {
    p.pages = pages_of(f, *rows.table, b, f.key().sizes()[2]);
    return job;
  }
  for (const auto& [input, cache] : {std::pair(&p.key, &f.key()), {&p.value, &f.value()}}) {
    skip(*input, row.row, cache->strides()[0], size);
    skip(*input, row.hidden, input->strides.row, size);
  }
  return job;
}

void attend(const Forward& f, const Sizes<int64_t>& sizes, const CacheRows& rows,
            const OutputAndLse& results) {
  if (!is_aligned(f)) return attend(*CopiedForward(f, aligned), sizes, rows, results);
  KernelCall kernel(f, sizes);
  ForwardResult result;
  kernel.bind(result.output, std::get<0>(results), Dims::head_row_column);
  kernel.bind(result.lse, std::get<1>(results), Dims::head_row);
  std::vector<ForwardJob> jobs;
  jobs.reserve(rows.rows.size());
  for (int64_t b = 0; b < sizes.batch[0]; ++b)
    jobs.push_back(item(f, rows, kernel.problem, result, results, b));
  attention_forward(jobs);
}

OutputAndLse kvcache_cpu(const KvCache& call) {
  const auto sizes = check<int64_t>(call);
  const CacheRows rows = cache_rows(call, sizes);
  OutputAndLse results = empty_results(call.forward, sizes);
  if (call.appends()) append(call, rows, num_threads());
  if (std::get<1>(results).numel() > 0) attend(call.forward, sizes, rows, results);
  return results;
}

OutputAndLse paged_varlen_cpu(const PagedVarlen& call) {
  const auto sizes = check<int64_t>(call);
  const Forward& f = call.forward;
  if (!is_aligned(f)) return paged_varlen_cpu({*CopiedForward(f, aligned), call.block_table});
  const Documents documents = paged_documents_of(f, sizes);
  c10::SmallVector<int64_t, 16> lengths;
  for (const Document& document : documents.all) lengths.push_back(document.seqlen_k);
  const auto pool = f.key().sizes();
  const BlockTable table(f.op, f.name_of(kKey), call.block_table, pool[0], pool[1], lengths);
  c10::SmallVector<Pages, 16> pages;
  for (size_t n = 0; n < lengths.size(); ++n) pages.push_back(pages_of(f, table, n, pool[1]));
  OutputAndLse results = empty_results(f, sizes);
  KernelCall kernel(f, sizes);
  ForwardResult result;
  kernel.bind(result.output, std::get<0>(results), Dims::head_row_column);
  kernel.bind(result.lse, std::get<1>(results), Dims::head_row);
  attention_forward(documents, kernel.problem, result, results, pages);
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) {
  using ops::Adapter;
  m.impl("attention_with_kvcache", Adapter<&kvcache::args, &kvcache_cpu>::call);
  m.impl("varlen_attention_paged", Adapter<&kvcache::paged_varlen_args, &paged_varlen_cpu>::call);
}

}  // namespace qkv
