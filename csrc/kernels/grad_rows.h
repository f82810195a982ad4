// A block of rows of the backward pass: its scratch memory, and what is packed
// into it before the first key.
namespace qkv::QKV_ISA {

template <class T>
struct BackwardScratch {
  const T *keys, *values;  // of the plane
  // One block of rows: natural [kGradRows, padded(D)], grad_output times the
  // factor of dropout ...
  T *query, *grad_output;
  // ... and tile by tile [padded(D), lanes].
  T *query_t, *grad_output_t, *grad_query_t;
  // weight_ij = factor_i * exp(score_ij - base_i) / 2^shift_i;
  // delta_i = <dO_i, O_i> - dlse_i + sum_j weight_ij * dweight_ij. All [kGradRows].
  T *base, *shift, *factor, *delta;
  T *weights, *grad_scores;  // [padded(kKeyBlock), kGradRows]
  T* cap_slope;              // likewise: the derivative of softcap, or null
  T *grad_key, *grad_value;  // [keys, padded(D)], [keys, padded(Dv)]
  T* key_sums;               // [keys, G, lanes of a vector], for a mask's gradient
  Dropout<T> dropout;

  BackwardScratch(Arena& arena, const Problem& p, int64_t batch, int64_t kv_head, int64_t key_count)
      : keys(plane<T>(p, p.key, batch, kv_head)),
        values(plane<T>(p, p.value, batch, kv_head)),
        query(arena.take<T>(kGradRows * padded<T>(p.head_dim))),
        grad_output(arena.take<T>(kGradRows * padded<T>(p.head_dim_v))),
        query_t(arena.take<T>(kGradRows * padded<T>(p.head_dim))),
        grad_output_t(arena.take<T>(kGradRows * padded<T>(p.head_dim_v))),
        grad_query_t(arena.take<T>(kGradRows * padded<T>(p.head_dim))),
        base(arena.take<T>(kGradRows)),
        shift(arena.take<T>(kGradRows)),
        factor(arena.take<T>(kGradRows)),
        delta(arena.take<T>(kGradRows)),
        weights(arena.take<T>(padded<T>(kKeyBlock) * kGradRows)),
        grad_scores(arena.take<T>(padded<T>(kKeyBlock) * kGradRows)),
        cap_slope(p.softcap > 0 ? arena.take<T>(kKeyBlock * kGradRows) : nullptr),
        grad_key(arena.take<T>(key_count * padded<T>(p.head_dim))),
        grad_value(arena.take<T>(key_count * padded<T>(p.head_dim_v))),
        key_sums(p.mask_type == MaskType::f32 || p.mask_type == MaskType::f64
                     ? arena.take<T>(key_count * p.group() * kLanes<T>)
                     : nullptr),
        dropout(p) {}

  // Whether neither factor nor delta of these rows is NaN or infinite.
  bool rows_are_finite(int64_t row, int rows) const {
    T zero = 0;
    for (int64_t r = row; r < row + rows; ++r) zero += (factor[r] + delta[r]) * 0;
    return zero == 0;
  }
};

template <class T>
QKV_INLINE T dot(const T* a, const T* b, int64_t b_col, int64_t dim) {
  Vec<T> sums{};
  int64_t d = 0;
  if (b_col == 1)
    for (; d + kLanes<T> <= dim; d += kLanes<T>) sums += load(a + d) * load(b + d);
  T sum = 0;
  for (; d < dim; ++d) sum += a[d] * b[d * b_col];
  QKV_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) sum += sums[i];
  return sum;
}

// weight = exp(score - lse), split so that nothing is rounded before the
// exponential (Reference) and the rest is computed in double. Lanes with nothing
// to attend to, lse -inf, and those without a row get weights of exactly 0.
template <class T>
void split_lse(const Problem& p, const Rows<const T>& lse, int64_t row, int64_t rows,
               const BackwardScratch<T>& s) {
  double exponent[kGradRows];
  T center[kGradRows];
  const double spread = std::log(double(p.seqlen_k));
  for (int64_t r = 0; r < kGradRows; ++r) {
    exponent[r] = r < rows ? *lse[row + r] : -HUGE_VAL;
    // All scores alike would be here; none is more than `spread` above.
    center[r] = T(exponent[r] - spread);
  }
  for (int64_t r = 0; r < kGradRows; r += kLanes<T>) {
    const Reference<T> reference(load(center + r));
    store(s.base + r, reference.base);
    store(s.shift + r, reference.shift);
  }
  for (int64_t r = 0; r < kGradRows; ++r)
    exponent[r] = exponent[r] == -HUGE_VAL
                      ? exponent[r]
                      : double(s.shift[r]) - (exponent[r] - double(s.base[r])) * kLog2e;
  for (int64_t r = 0; r < kGradRows; r += kVectorsInStep * kLanes<double>) {
    Vec<double> t[kVectorsInStep];
    QKV_UNROLL
    for (int i = 0; i < kVectorsInStep; ++i) t[i] = load(exponent + r + i * kLanes<double>);
    exp2<double>(t);
    QKV_UNROLL
    for (int i = 0; i < kVectorsInStep; ++i) store(exponent + r + i * kLanes<double>, t[i]);
  }
  for (int64_t r = 0; r < kGradRows; ++r) s.factor[r] = T(exponent[r]);
}

// Packs rows [row, row + rows) and what each needs of the forward pass.
template <class T>
void pack_grad_rows(const Problem& p, const BackwardArgs& a, int64_t batch, int64_t kv_head,
                    int64_t row, int64_t rows, const BackwardScratch<T>& s) {
  const auto input = [&](const Input& t) { return rows_of<T>(p, t, batch, kv_head); };
  const int64_t lanes = padded<T>(rows);
  gather_rows(input(p.query), row, rows, lanes, p.head_dim, s.query);
  const int64_t step = padded<T>(p.head_dim_v);
  if (a.grad_output.data) {
    gather_rows(input(a.grad_output), row, rows, lanes, p.head_dim_v, s.grad_output);
  } else {
    std::fill_n(s.grad_output, lanes * step, T(0));
  }
  split_lse(p, input(a.lse), row, rows, s);
  const Rows<const T> output = input(a.output), grad_lse = input(a.grad_lse);
  const Rows<const T> weights_dot = input(a.grad_weights_dot);
  std::fill_n(s.delta, kGradRows, T(0));
  if (a.grad_output.data)
    for (int64_t r = 0; r < rows; ++r)
      s.delta[r] = dot(s.grad_output + r * step, output[row + r], output.col, p.head_dim_v);
  if (grad_lse.data)
    for (int64_t r = 0; r < rows; ++r) s.delta[r] -= *grad_lse[row + r];
  if (weights_dot.data)
    for (int64_t r = 0; r < rows; ++r) s.delta[r] += *weights_dot[row + r];
  if (p.dropout_p > 0 && a.grad_output.data)
    for (int64_t i = 0; i < rows * step; ++i) s.grad_output[i] *= T(dropout_scale(p.dropout_p));
}

}  // namespace qkv::QKV_ISA
