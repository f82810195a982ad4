// Dispatch key CPU: the seed of one call's dropout, from torch's default generator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "ops.h"

namespace qkv {
namespace {

at::Tensor dropout_seed_cpu(const at::Tensor&) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  at::Tensor seed = at::empty({1}, at::kLong);
  std::lock_guard<std::mutex> lock(generator->mutex_);
  *seed.mutable_data_ptr<int64_t>() = int64_t(generator->random64());
  return seed;
}

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CPU, m) { m.impl("dropout_seed", &dropout_seed_cpu); }

}  // namespace qkv
