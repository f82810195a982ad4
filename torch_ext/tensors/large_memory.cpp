#include "tensors/large_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarType.h>
#include <sys/mman.h>

namespace qkv {
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

// Lies directly before the memory that a Mapping hands out.
struct Mapping {
  void* begin;
  size_t bytes;
};

void unmap(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  const Mapping mapping = static_cast<const Mapping*>(data)[-1];
  munmap(mapping.begin, mapping.bytes);
}

// Zeroed memory of its own, aligned to a huge page; null if there is none to be had. As with what
// torch's CPU allocator returns, context and data are the same pointer (torch._lazy_clone asks for
// that), and torch's profiler is told.
c10::DataPtr mapped_zeros(size_t bytes) {
  const size_t mapped = bytes + kHugePage;  // room for the alignment, and for the Mapping
  void* const begin =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return {};
  void* const data = reinterpret_cast<void*>((uintptr_t(begin) / kHugePage + 1) * kHugePage);
  ask_for_huge_pages(data, bytes);
  static_cast<Mapping*>(data)[-1] = {begin, mapped};
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return {data, data, &unmap, at::Device(at::kCPU)};
}

}  // namespace

at::Tensor in_huge_pages(at::Tensor tensor) {
  if (tensor.nbytes() >= kNeverRecycled)
    ask_for_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  return tensor;
}

at::Tensor zeros(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const size_t bytes = size_t(c10::multiply_integers(sizes)) * c10::elementSize(dtype);
  c10::DataPtr memory = bytes < 2 * kHugePage ? c10::DataPtr() : mapped_zeros(bytes);
  if (!memory)  // of a large tensor: this raises torch's error
    return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype)).zero_();
  // A storage like any other: it belongs to torch's allocator, from which resize_() gets more.
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory),
                       c10::GetCPUAllocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

}  // namespace qkv
