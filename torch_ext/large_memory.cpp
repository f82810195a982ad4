#include "large_memory.h"

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

namespace {

constexpr size_t kHugePage = size_t(2) << 20;
// glibc's largest threshold (M_MMAP_THRESHOLD): what is larger is never recycled.
constexpr size_t kNeverRecycled = size_t(32) << 20;

// The whole pages inside. A wish: small ones will do.
void ask_for_huge_pages(void* data, size_t bytes) {
  const uintptr_t begin = (uintptr_t(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (uintptr_t(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

at::Tensor in_huge_pages(at::Tensor tensor) {
  if (tensor.nbytes() >= kNeverRecycled)
    ask_for_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  return tensor;
}

at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  if (bytes < 2 * kHugePage) return written_zeros(sizes, strides, dtype);
  const size_t mapped = bytes + kHugePage;
  void* const memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return written_zeros(sizes, strides, dtype);  // raises torch's error
  ask_for_huge_pages(memory, mapped);
  const uintptr_t aligned = (uintptr_t(memory) + kHugePage - 1) / kHugePage * kHugePage;
  return at::from_blob(
      reinterpret_cast<void*>(aligned), sizes, strides,
      [memory, mapped](void*) { munmap(memory, mapped); }, at::TensorOptions(dtype));
}

#else

at::Tensor in_huge_pages(at::Tensor tensor) { return tensor; }

at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return written_zeros(sizes, strides, dtype);
}

#endif

}  // namespace qkv
