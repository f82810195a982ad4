#include "ops/linear/products.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

#include "call/dtypes.h"
#include "row_product.h"
#include "tensors/problem.h"
#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace qkv::ops {
namespace {

using at::Tensor;

// A call of oneDNN takes some 12 microseconds longer than one of MKL.
//
// Zen 4 (family 25, model 17, two cores): outputs 1.09 to 1.18 times MKL for 256 to 4096 rows and
// widths of 384 to 2304, which is not worth a call of less than that; gradients of weights 0.69 to
// 0.95.
//
// Zen 5 (family 26, model 2, one and two cores): outputs of 512 rows on 1.9 to 2.5 times MKL, of 4
// to 256 rows 1.1 to 2.9, and of a single row 1.1 to 2.1 on two cores and as fast on one, where
// weights come from memory 1.1 to 1.8, for MKL reads them at 20 GB/s and oneDNN at 37. Gradients
// of inputs 1.1 to 3.7, and 0.5 to 1.4 of one row. Gradients of weights 1.0 to 2.1.
//
// Few rows by the core library there, beside what torch takes, of weights from memory, for widths
// of 576 to 11008, on one core and on two: outputs of one row, of float32 1.2 to 2.5, bfloat16 1.4
// to 2.6, float16 0.9 to 1.2; of 2 to 8 rows 1.8 to 6.9, 0.9 (seven of a depth of 11008 on one
// core) to 1.9, and 1.0 to 4.8. Beside oneDNN, of float32, 1.0 to 1.9.
//
// An Intel Xeon with AMX, 2 and 16 threads: outputs 0.82 to 1.07.
WhoMultiplies measured() {
#ifdef __x86_64__
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAuthenticAmd = 0x68747541;  // "Auth", the first letters of the vendor
  if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx) || ebx != kAuthenticAmd) return {};
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return {};
  const unsigned family = (eax >> 8 & 15) + (eax >> 20 & 255);
  const unsigned model = (eax >> 4 & 15) | (eax >> 12 & 240);
  const bool zen4 = family == 25 && ((model >= 0x10 && model < 0x20) ||
                                     (model >= 0x60 && model < 0x80) || model >= 0xa0);
  if (zen4) return {.outputs = int64_t(1) << 25};
  if (family == 26)
    return {.outputs = int64_t(1) << 21,
            .weights = int64_t(1) << 23,
            .f32_rows = 8,
            .bf16_rows = 8,
            .f16_rows = 8};
#endif
  return {};
}

// By their names; none: as measured.
WhoMultiplies by_name(const std::optional<std::string>& library) {
  if (!library) {
    const bool has_onednn =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""}).has_value();
    WhoMultiplies who = measured();
    if (!has_onednn) who.outputs = who.weights = kNever;
    return who;
  }
  if (*library == "oneDNN") return {.outputs = 0, .weights = 0};
  constexpr int64_t kAll = kMostProductRows;
  if (*library == "qkv") return {.f32_rows = kAll, .bf16_rows = kAll, .f16_rows = kAll};
  return {};
}

// Written by tests alone, while nothing is multiplied.
WhoMultiplies& chosen() {
  static WhoMultiplies who = by_name(std::nullopt);
  return who;
}

std::string names() {
  const WhoMultiplies& who = who_multiplies();
  const bool few = who.f32_rows > 0;
  if (who.outputs == kNever) return few ? "qkv" : "torch";
  return few ? "oneDNN and qkv" : "oneDNN";
}

// A product that has no data yet, of rows that follow each other without a gap.
RowProduct product_of(const Tensor& input, const Tensor& matrix) {
  RowProduct p;
  p.dtype = *dtype_of(input.scalar_type());
  p.batch = matrix.dim() == 3 ? matrix.size(0) : 1;
  p.depth = matrix.size(-1), p.columns = matrix.size(-2);
  p.rows = input.numel() / std::max<int64_t>(1, p.batch * p.depth);
  p.input.strides.row = p.depth, p.input.strides.head = p.rows * p.depth;
  p.output.strides.row = p.columns, p.output.strides.head = p.rows * p.columns;
  p.input.strides.col = p.output.strides.col = 1;
  p.matrix.strides.col = matrix.stride(-1), p.matrix.strides.row = matrix.stride(-2);
  if (matrix.dim() == 3) p.matrix.strides.head = matrix.stride(0);
  return p;
}

}  // namespace

const WhoMultiplies& who_multiplies() { return chosen(); }

bool are_few_rows(const Tensor& input, const Tensor& matrix) {
  const WhoMultiplies& who = who_multiplies();
  const at::ScalarType dtype = input.scalar_type();
  const int64_t most = dtype == at::kFloat      ? who.f32_rows
                       : dtype == at::kBFloat16 ? who.bf16_rows
                       : dtype == at::kHalf     ? who.f16_rows
                                                : 0;
  if (most == 0) return false;
  const RowProduct p = product_of(input, matrix);
  return p.rows <= most && multiplies_rows(p);
}

Tensor few_rows(const Tensor& input, const Tensor& matrix, const std::optional<Tensor>& bias) {
  RowProduct p = product_of(input, matrix);
  const Tensor rows = input.contiguous();
  at::DimVector sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = p.columns;
  const Tensor output = at::empty(sizes, input.options());
  p.input.data = rows.const_data_ptr(), p.matrix.data = matrix.const_data_ptr();
  p.output.data = output.mutable_data_ptr();
  if (bias) p.bias.data = bias->const_data_ptr(), p.bias.strides.col = bias->stride(0);
  p.num_threads = num_threads();
  row_product(p);
  return output;
}

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  // Who multiplies what torch.nn.functional.linear would multiply more slowly.
  m.def("_projections() -> str", &names);
  // For tests: whatever "oneDNN" or "qkv" can multiply, or "torch" all; and as the table says.
  m.def("_set_projections(str? library) -> ()",
        [](std::optional<std::string> library) { chosen() = by_name(library); });
}

}  // namespace qkv::ops
