// Dispatch key CPU: attention_with_kvcache, varlen_attention_paged.
#include <optional>

#include "ops/kvcache/rows.h"
#include "ops/rotate/rotate.h"
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
    input->strides.batch[0] = place_stride(scale);
    if (is_per_token(scale)) {
      input->strides.head = scale.strides()[head];
      input->strides.row = scale.strides()[3 - head];
    } else if (scale.numel() > 1) {
      input->strides.head = scale.strides()[0];
    }
  }
}

// The blocks of key and value, without a table; `size` is how many rows each has.
Pages blocks_of(const Call& call, int64_t size) {
  return {nullptr,
          size,
          call[arg::key].strides()[0],
          call[arg::value].strides()[0],
          place_stride(call[arg::key_scale]),
          place_stride(call[arg::value_scale])};
}

// `head` is the dimension of key and value that has the heads.
void attend_to_spans(const Call& call, const Sizes<int64_t>& sizes, int64_t head,
                     const std::vector<Span>& spans, const Tensors& results) {
  if (!is_aligned(call))
    return attend_to_spans(*CopiedCall(call, aligned), sizes, head, spans, results);
  KernelCall kernel(call, sizes);
  ForwardResult result;
  kernel.bind({&result.output, &result.lse}, results);
  kernel.set_strides();
  Problem& p = kernel.problem;
  bind_scales(call, head, p);
  if (call.has(arg::block_table)) p.pages = blocks_of(call, call[arg::key].sizes()[3 - head]);
  p.spans = spans.data();
  qkv::attention_forward(p, result);
}

// `call` with query and what is appended rotated to their places, as long as this lives.
class RotatedCall {
 public:
  // Throws c10::Error where cos and sin have no row for a place.
  RotatedCall(const Call& call, const CacheRows& rows) : call_(call) {
    const at::Tensor &query = call[arg::query], &cos = call[arg::cos];
    const Window& window = call.options.window_size;
    const bool moves = call.options.causal || window.left >= 0 || window.right >= 0;
    const int64_t last =
        std::max(rows.new_rows, moves ? query.size(2) : std::min<int64_t>(query.size(2), 1));
    std::vector<int64_t> places, of_heads;  // of_heads: each place for all heads of its query
    for (int64_t b = 0; b < query.size(0); ++b) {
      places.push_back(rows.length(b));
      if (!moves) of_heads.insert(of_heads.end(), query.size(1), places.back());
      TORCH_CHECK(places.back() + last <= cos.size(0), call.title(), ": rotary_cos has ",
                  cos.size(0), " rows, but ", places.back() + last, " are expected: batch item ", b,
                  " has ", places.back(), " keys before ", last, " more places are rotated to");
    }
    const auto rotated = [&](const at::Tensor& x, c10::ArrayRef<int64_t> begins) {
      return rotated_from(x, cos, call[arg::sin], call.options.rotary_interleaved.value_or(true),
                          begins);
    };
    key_ = rotated(call[arg::new_key], places);
    // Queries at one place are heads of one query.
    query_ = moves ? rotated(query, places) : rotated(query.unsqueeze(3), of_heads).squeeze(3);
    call_.set(arg::query, query_), call_.set(arg::new_key, key_);
  }
  RotatedCall(const RotatedCall&) = delete;
  const Call& operator*() const { return call_; }

 private:
  at::Tensor query_, key_;
  Call call_;
};

}  // namespace

Tensors kvcache_cpu(const Call& call) {
  const auto sizes = check_kvcache<int64_t>(call);
  const CacheRows rows = cache_rows(call, sizes);
  Tensors results = empty_results(call, sizes);
  std::optional<RotatedCall> rotated;
  if (call.has(arg::cos)) rotated.emplace(call, rows);
  const Call& turned = rotated ? **rotated : call;
  if (appends(turned)) append(turned, rows, num_threads());
  if (results[1].numel() > 0) attend_to_spans(turned, sizes, 1, rows.spans, results);
  return results;
}

Tensors paged_varlen_cpu(const Call& call) {
  const auto sizes = check_kvcache<int64_t>(call);
  Documents documents = documents_of(call, sizes);
  const auto pages = set_pages(call, call[arg::key].sizes()[1], documents.all);
  Tensors results = empty_results(call, sizes);
  fill_gaps(documents, sizes.seqlen_q, results);
  if (!documents.all.empty()) attend_to_spans(call, sizes, 2, documents.all, results);
  return results;
}

}  // namespace qkv::ops
