#include "zeros.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qkv {
namespace {

at::Tensor written_zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype)).zero_();
}

}  // namespace

#if defined(__linux__)

at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  constexpr size_t kHugePage = size_t(2) << 20;
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  // Smaller ones lie in recycled memory: no faults.
  if (bytes < 2 * kHugePage) return written_zeros(sizes, strides, dtype);
  const size_t mapped = bytes + kHugePage;
  void* const memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return written_zeros(sizes, strides, dtype);  // raises torch's error
  const uintptr_t aligned = (uintptr_t(memory) + kHugePage - 1) / kHugePage * kHugePage;
  void* const data = reinterpret_cast<void*>(aligned);
  madvise(data, bytes, MADV_HUGEPAGE);  // a wish: small pages will do
  return at::from_blob(
      data, sizes, strides, [memory, mapped](void*) { munmap(memory, mapped); },
      at::TensorOptions(dtype));
}

#else

at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return written_zeros(sizes, strides, dtype);
}

#endif

}  // namespace qkv
