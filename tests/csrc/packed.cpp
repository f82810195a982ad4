#include "packed.h"

#include <algorithm>
#include <numeric>

#include "double_workload.h"

namespace qkv::test {

template <class F>
void PackedTensor::for_each_of(size_t n, F f) const {
  const Sizes& part = parts_[n];
  const Place& at = places_[n];
  for (int64_t h = 0; h < part[0]; ++h)
    for (int64_t i = 0; i < part[1]; ++i)
      for (int64_t j = 0; j < part[2]; ++j) f(memory_.offset({at.item, h, at.row + i, at.col + j}));
}

void PackedTensor::write(size_t n, const std::vector<double>& values) {
  size_t next = 0;
  if (*this) for_each_of(n, [&](int64_t at) { memory_.set(at, values[next++]); });
}

std::vector<double> PackedTensor::values(size_t n) const {
  std::vector<double> all;
  if (*this) for_each_of(n, [&](int64_t at) { all.push_back(memory_.get(at)); });
  return all;
}

void PackedTensor::expect_nothing_else_written() const {
  if (!*this) return;
  const bool is_alone = memory_.wrote_only([this](const auto& own) {
    for (size_t n = 0; n < parts_.size(); ++n) for_each_of(n, own);
  });
  EXPECT_TRUE(is_alone) << "something beside the elements of the documents was written";
}

namespace {

// The numbers of documents in their order in memory.
std::vector<size_t> order_in_memory(size_t documents, const Layout& layout, Random& random) {
  std::vector<size_t> order(documents);
  std::iota(order.begin(), order.end(), size_t{0});
  if (!layout.in_order) std::shuffle(order.begin(), order.end(), random);
  return order;
}

std::vector<Case> with_dropout(std::vector<Case> cases) {
  for (size_t n = 0; n < cases.size(); ++n) {
    const size_t item = cases[0].own_seeds ? n % 3 : n;
    cases[n].dropout_batch = cases[0].dropout_batch + int64_t(item);
    cases[n].dropout_seed = cases[0].seed + (n - item);
  }
  return cases;
}

}  // namespace

Packed::Packed(std::vector<Case> cases, const Layout& layout) : layout_(layout) {
  for (const Case& c : with_dropout(std::move(cases))) documents_.emplace_back(c);
  place_documents();
  if (common().own_seeds)
    for (size_t n = 0; n < size(); n += 3)
      seeds_.push_back(int64_t(document(n).problem().dropout_seed));
  query_ = pack(Of::queries, &JvpWorkload::query);
  key_ = pack(Of::keys, &JvpWorkload::key);
  value_ = pack(Of::keys, &JvpWorkload::value);
  mask_ = pack(Of::pairs, &JvpWorkload::mask, layout.share_mask[0]);
  bias_ = pack(Of::pairs, &JvpWorkload::bias, layout.share_mask[1]);
  key_spans_ = pack(Of::rows, &JvpWorkload::key_spans);
  alibi_slopes_ = pack(Of::heads, &JvpWorkload::alibi_slopes);
  sinks_ = pack(Of::heads, &JvpWorkload::sinks);
  grad_output_ = pack(Of::queries, &JvpWorkload::grad_output);
  grad_lse_ = pack(Of::queries, &JvpWorkload::grad_lse);
  query_jvp_ = pack(Of::queries, &JvpWorkload::query_jvp);
  key_jvp_ = pack(Of::keys, &JvpWorkload::key_jvp);
  value_jvp_ = pack(Of::keys, &JvpWorkload::value_jvp);
  mask_jvp_ = pack(Of::pairs, &JvpWorkload::mask_jvp, layout.share_mask[0]);
  bias_jvp_ = pack(Of::pairs, &JvpWorkload::bias_jvp, layout.share_mask[1]);
  slopes_jvp_ = pack(Of::heads, &JvpWorkload::slopes_jvp);
  sinks_jvp_ = pack(Of::heads, &JvpWorkload::sinks_jvp);
}

// Between documents there are gaps of up to two rows.
void Packed::place_documents() {
  Random random(layout_.seed);
  spans_.resize(size());
  for (size_t n : order_in_memory(size(), layout_, random)) {
    const Case& c = document(n).c;
    spans_[n].seqlen_q = c.L;
    spans_[n].query_begin = query_rows_ += draw(random, 0, 2);
    query_rows_ += c.L;
    most_queries_ = std::max(most_queries_, c.L), most_keys_ = std::max(most_keys_, c.S);
  }
  std::vector<int64_t> rows(size_t(layout_.key_items));
  for (size_t n : order_in_memory(size(), layout_, random)) {
    const Case& c = document(n).c;
    spans_[n].seqlen_k = c.S;
    spans_[n].key_item = draw(random, 0, layout_.key_items - 1);
    int64_t& its_rows = rows[size_t(spans_[n].key_item)];
    spans_[n].key_begin = its_rows += draw(random, 0, 2);
    its_rows += c.S;
  }
  query_rows_ += draw(random, 0, 2);
  key_rows_ = *std::max_element(rows.begin(), rows.end()) + draw(random, 0, 2);
}

PackedTensor Packed::make(Of of, Type type, int64_t heads, int64_t cols, bool shared,
                          bool share_heads) const {
  const bool per_document = (of == Of::pairs && !shared) || of == Of::rows || of == Of::heads;
  const bool of_keys = of == Of::keys || of == Of::key_columns;
  Sizes sizes = {per_document ? int64_t(size()) : of_keys ? layout_.key_items : 1, heads, 1, cols};
  if (of == Of::queries) sizes[2] = query_rows_;
  if (of == Of::keys) sizes[2] = key_rows_;
  if (of == Of::key_columns) sizes[3] = key_rows_;
  if (of == Of::pairs || of == Of::rows) sizes[2] = most_queries_;
  if (of == Of::pairs) sizes[3] = most_keys_;
  std::vector<PackedTensor::Place> places;
  std::vector<Sizes> parts;
  for (size_t n = 0; n < size(); ++n) {
    const Span& s = spans_[n];
    const int64_t item = per_document ? int64_t(n) : of_keys ? s.key_item : 0;
    places.push_back({item,
                      of == Of::queries ? s.query_begin
                      : of == Of::keys  ? s.key_begin
                                        : 0,
                      of == Of::key_columns ? s.key_begin : 0});
    parts.push_back({heads, 1, cols});
    if (of == Of::queries || of == Of::pairs || of == Of::rows) parts[n][1] = s.seqlen_q;
    if (of == Of::keys) parts[n][1] = s.seqlen_k;
    if (of == Of::key_columns || of == Of::pairs) parts[n][2] = s.seqlen_k;
  }
  // Heads lie inside of rows, or outside.
  Random random(layout_.seed + uint64_t(of) + uint64_t(cols));
  Sizes strides = dense_strides(sizes);
  if (common().strided)
    strides = random_strides(random, sizes, false);
  else if (of != Of::pairs && draw(random, 0, 1))
    strides = {sizes[1] * sizes[2] * sizes[3], sizes[3], sizes[1] * sizes[3], 1};
  if (sizes[0] == 1) strides[0] = 0;
  if (share_heads) strides[1] = 0;
  return {Tensor(type, sizes, strides, common().at_front), places, parts};
}

// What documents share is at first what the last of them has; then all are given the same.
PackedTensor Packed::pack(Of of, Tensor JvpWorkload::* which, bool shared) {
  const Tensor& first = documents_[0].*which;
  if (!first) return {};
  PackedTensor packed = make(of, first.type(), first.sizes()[0], first.sizes()[2], shared);
  packed.fill([&] {
    return first.type() == Type::byte ? 1 : first.type() == Type::int32 ? 0 : kNaN;
  });
  for (size_t n = 0; n < size(); ++n) packed.write(n, (documents_[n].*which).values());
  for (size_t n = 0; n < size() && shared; ++n) {
    const std::vector<double> values = packed.values(n);
    size_t next = 0;
    (documents_[n].*which).fill([&] { return values[next++]; });
  }
  packed.memory().make_read_only();
  return packed;
}

Problem Packed::problem(int num_threads) const {
  Problem p = document(0).problem();
  p.batch_rank = 1, p.batch_sizes[0] = int64_t(size());
  p.spans = spans_.data();
  p.seqlen_q = p.seqlen_k = -1;  // no document's
  p.query = query_.input();
  const auto of_keys = [](Input& input, const PackedTensor& from) {
    const int64_t head_repeat = input.strides.head_repeat;
    input = from.input(), input.strides.head_repeat = head_repeat;
  };
  of_keys(p.key, key_), of_keys(p.value, value_);
  p.masks[0].input = mask_.input(), p.masks[1].input = bias_.input();
  p.key_spans.input = key_spans_.input();
  p.by_head[kAlibiSlopes] = alibi_slopes_.input(), p.by_head[kSinks] = sinks_.input();
  if (!seeds_.empty()) p.dropout_seeds = seeds_.data(), p.dropout_items = 3;
  p.num_threads = num_threads;
  return p;
}

JvpArgs Packed::directions() const {
  JvpArgs a = document(0).args();
  a.query = query_jvp_.input(), a.key = key_jvp_.input(), a.value = value_jvp_.input();
  a.key.strides.head_repeat = common().key_head_repeat;
  a.value.strides.head_repeat = common().value_head_repeat;
  a.masks[0].input = mask_jvp_.input(), a.masks[1].input = bias_jvp_.input();
  a.by_head[kAlibiSlopes] = slopes_jvp_.input(), a.by_head[kSinks] = sinks_jvp_.input();
  a.output = {};
  return a;
}

namespace {

using Of = Packed::Of;

// The memory for a packed batch's results.
class PackedOutputs {
 public:
  explicit PackedOutputs(const Packed& packed) : packed_(packed) {
    const Case& c = packed.common();
    const int64_t H = c.heads();
    const Type element = type_of(c.dtype), compute = packed.document(0).compute_element();
    output_ = packed.make(Of::queries, element, H, c.Dv);
    lse_ = packed.make(Of::queries, compute, H, 1);
    if (c.grad_query) grad_query_ = packed.make(Of::queries, element, H, c.D);
    if (c.grad_key) grad_key_ = packed.make(Of::keys, element, c.kv_heads, c.D);
    if (c.grad_value) grad_value_ = packed.make(Of::keys, element, c.kv_heads, c.Dv);
    if (c.grad_alibi_slopes) grad_alibi_slopes_ = packed.make(Of::heads, Type::f64, H, 1);
    if (c.grad_sinks) grad_sinks_ = packed.make(Of::heads, Type::f64, H, 1);
    if (c.grad_mask_keys) mask_keys_[0] = packed.make(Of::key_columns, compute, H, 1);
    if (c.grad_bias_keys) mask_keys_[1] = packed.make(Of::key_columns, compute, H, 1);
    if (c.grad_mask_queries) mask_queries_[0] = packed.make(Of::queries, compute, H, 1);
    if (c.grad_bias_queries) mask_queries_[1] = packed.make(Of::queries, compute, H, 1);
    if (c.grad_mask) make_sums(0);
    if (c.grad_bias) make_sums(1);
  }

  ForwardResult forward_result() const { return {output_.output(), lse_.output()}; }
  BackwardArgs backward_args() const {
    BackwardArgs a;
    a.output = output_.input(), a.lse = lse_.input();
    a.grad_output = packed_.grad_output(), a.grad_lse = packed_.grad_lse();
    a.grad_query = grad_query_.output(), a.grad_key = grad_key_.output();
    a.grad_value = grad_value_.output();
    for (int m = 0; m < kMasks; ++m)
      a.grad_masks[m] = {sums_[m].output(), mask_keys_[m].output(), mask_queries_[m].output()};
    a.grad_by_head[kAlibiSlopes] = grad_alibi_slopes_.output(),
    a.grad_by_head[kSinks] = grad_sinks_.output();
    return a;
  }
  const PackedTensor& sums(int m) const { return sums_[m]; }

  void forward_is_done() const {
    output_.memory().make_read_only(), lse_.memory().make_read_only();
  }
  PackedResults results() const {
    for (const PackedTensor* t : {&output_, &lse_, &grad_query_, &grad_key_, &grad_value_,
                                  &grad_alibi_slopes_, &grad_sinks_, &mask_keys_[0], &mask_keys_[1],
                                  &mask_queries_[0], &mask_queries_[1], &sums_[0], &sums_[1]})
      t->expect_nothing_else_written();
    PackedResults all;
    for (size_t n = 0; n < packed_.size(); ++n) all.documents.push_back(document(n));
    for (int m = 0; m < kMasks; ++m)
      if (sums_[m] && packed_.layout().share_mask[m]) all.sums[m] = sums_[m].memory().values();
    return all;
  }

 private:
  // The sums begin with the numbers that a document alone has, or, where they are shared, with
  // others.
  void make_sums(int m) {
    const Case& c = packed_.common();
    const bool shared = packed_.layout().share_mask[m];
    PackedTensor& sums = sums_[m];
    sums = packed_.make(Of::pairs, packed_.document(0).compute_element(), c.heads(), 1, shared,
                        c.share_heads);
    for (size_t n = 0; n < packed_.size(); ++n)
      sums.write(n, packed_.document(n).make_grad_mask().values());
  }

  Results document(size_t n) const {
    const auto& share = packed_.layout().share_mask;
    Results r;
    r.output = output_.values(n), r.lse = lse_.values(n);
    r.grad_query = grad_query_.values(n), r.grad_key = grad_key_.values(n);
    r.grad_value = grad_value_.values(n);
    if (!share[0]) r.grad_mask = sums_[0].values(n);
    if (!share[1]) r.grad_bias = sums_[1].values(n);
    r.grad_mask_keys = mask_keys_[0].values(n), r.grad_bias_keys = mask_keys_[1].values(n);
    r.grad_mask_queries = mask_queries_[0].values(n);
    r.grad_bias_queries = mask_queries_[1].values(n);
    r.grad_alibi_slopes = grad_alibi_slopes_.values(n), r.grad_sinks = grad_sinks_.values(n);
    return r;
  }

  const Packed& packed_;
  PackedTensor output_, lse_, grad_query_, grad_key_, grad_value_, grad_alibi_slopes_, grad_sinks_;
  std::array<PackedTensor, kMasks> sums_, mask_keys_, mask_queries_;
};

}  // namespace

PackedResults run(const Packed& packed, int num_threads) {
  const Problem p = packed.problem(num_threads);
  const PackedOutputs outputs(packed);
  attention_forward(p, outputs.forward_result());
  outputs.forward_is_done();
  attention_backward(p, outputs.backward_args());
  return outputs.results();
}

PackedResults run_double(const Packed& packed, int num_threads) {
  const Problem p = packed.problem(num_threads);
  const Case& c = packed.common();
  const PackedOutputs outputs(packed);
  const PackedTensor output_jvp = packed.make(Of::queries, type_of(c.dtype), c.heads(), c.Dv);
  const PackedTensor lse_jvp =
      packed.make(Of::queries, packed.document(0).compute_element(), c.heads(), 1);
  attention_forward(p, outputs.forward_result());
  attention_jvp(p, packed.directions(), {{}, {}, output_jvp.output(), lse_jvp.output()});
  outputs.forward_is_done();
  output_jvp.memory().make_read_only(), lse_jvp.memory().make_read_only();
  const BackwardDirection direction{packed.directions(), output_jvp.input(), lse_jvp.input()};
  BackwardArgs args = outputs.backward_args();
  args.direction = &direction;
  attention_backward(p, args);
  return outputs.results();
}

std::vector<Results> run_forward(const Packed& packed, const Problem& problem) {
  const Case& c = packed.common();
  const PackedTensor output = packed.make(Of::queries, type_of(c.dtype), c.heads(), c.Dv);
  const PackedTensor lse =
      packed.make(Of::queries, packed.document(0).compute_element(), c.heads(), 1);
  attention_forward(problem, {output.output(), lse.output()});
  output.expect_nothing_else_written(), lse.expect_nothing_else_written();
  std::vector<Results> all(packed.size());
  for (size_t n = 0; n < packed.size(); ++n)
    all[n].output = output.values(n), all[n].lse = lse.values(n);
  return all;
}

std::vector<Results> run_hard(const Packed& packed, int num_threads) {
  const Case& c = packed.common();
  const PackedTensor output = packed.make(Of::queries, type_of(c.dtype), c.heads(), c.Dv);
  const PackedTensor index = packed.make(Of::queries, Type::int64, c.heads(), 1);
  attention_hard(packed.problem(num_threads), {output.output(), index.output()});
  output.expect_nothing_else_written(), index.expect_nothing_else_written();
  std::vector<Results> all(packed.size());
  for (size_t n = 0; n < packed.size(); ++n)
    all[n].hard_output = output.values(n), all[n].hard_index = index.values(n);
  return all;
}

std::vector<JvpResults> run_jvp(const Packed& packed, int num_threads) {
  const Case& c = packed.common();
  const Type element = type_of(c.dtype), compute = packed.document(0).compute_element();
  const PackedTensor output = packed.make(Of::queries, element, c.heads(), c.Dv);
  const PackedTensor lse = packed.make(Of::queries, compute, c.heads(), 1);
  const PackedTensor output_jvp = packed.make(Of::queries, element, c.heads(), c.Dv);
  const PackedTensor lse_jvp = packed.make(Of::queries, compute, c.heads(), 1);
  attention_jvp(packed.problem(num_threads), packed.directions(),
                {output.output(), lse.output(), output_jvp.output(), lse_jvp.output()});
  for (const PackedTensor* t : {&output, &lse, &output_jvp, &lse_jvp})
    t->expect_nothing_else_written();
  std::vector<JvpResults> all;
  for (size_t n = 0; n < packed.size(); ++n)
    all.push_back({output.values(n), lse.values(n), output_jvp.values(n), lse_jvp.values(n)});
  return all;
}

PackedResults run_one_by_one(const Packed& packed) {
  const PackedOutputs shared(packed);
  PackedResults all;
  for (size_t n = 0; n < packed.size(); ++n) {
    const JvpWorkload& w = packed.document(n);
    const Outputs outputs(w);
    attention_forward(w.problem(), outputs.forward_result(true));
    BackwardArgs args = outputs.backward_args();
    for (int m = 0; m < kMasks; ++m)
      if (packed.layout().share_mask[m]) args.grad_masks[m].each = shared.sums(m).output();
    attention_backward(w.problem(), args);
    Results& own = all.documents.emplace_back(outputs.values());
    if (packed.layout().share_mask[0]) own.grad_mask.clear();
    if (packed.layout().share_mask[1]) own.grad_bias.clear();
  }
  for (int m = 0; m < kMasks; ++m)
    if (packed.layout().share_mask[m] && shared.sums(m))
      all.sums[m] = shared.sums(m).memory().values();
  return all;
}

std::array<std::vector<double>, kMasks> true_sums(const Packed& packed,
                                                  const PackedResults& actual) {
  const PackedOutputs first(packed);
  std::array<std::vector<double>, kMasks> all;
  std::array<PackedTensor, kMasks> sums;
  for (int m = 0; m < kMasks; ++m) {
    if (!packed.layout().share_mask[m] || !first.sums(m)) continue;
    all[m] = first.sums(m).memory().values();
    const Case& c = packed.common();
    sums[m] = packed.make(Of::pairs, Type::f64, c.heads(), 1, true);
    size_t next = 0;
    sums[m].fill([&] { return all[m][next++]; });
  }
  for (size_t n = 0; n < packed.size(); ++n) {
    const JvpWorkload& w = packed.document(n);
    const Results its = truth(w, actual.documents[n]);
    const auto add = [&](int m, const std::vector<double>& gradient) {
      if (!sums[m]) return;
      std::vector<double> sum = sums[m].values(n);
      const std::vector<double> before = w.make_grad_mask().values();
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i] - before[i];
      sums[m].write(n, sum);
    };
    add(0, its.grad_mask), add(1, its.grad_bias);
  }
  for (int m = 0; m < kMasks; ++m)
    if (sums[m]) all[m] = sums[m].memory().values();
  return all;
}

void expect_identical(const PackedResults& actual, const PackedResults& expected) {
  ASSERT_EQ(actual.documents.size(), expected.documents.size());
  for (size_t n = 0; n < expected.documents.size(); ++n) {
    SCOPED_TRACE(::testing::Message() << "document " << n);
    expect_identical(actual.documents[n], expected.documents[n]);
  }
  for (int m = 0; m < kMasks; ++m) {
    SCOPED_TRACE(::testing::Message() << "the sum of the gradients of mask " << m);
    expect_same_bits(actual.sums[m], expected.sums[m]);
  }
}

}  // namespace qkv::test
