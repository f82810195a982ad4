#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "ops/attention/attention.h"

namespace qkv::ops {
namespace {

// int64 [1], from torch's default generator.
at::Tensor seed_cpu(const at::Tensor&) {
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      std::nullopt, at::detail::getDefaultCPUGenerator());
  at::Tensor seed = at::empty({1}, at::kLong);
  std::lock_guard<std::mutex> lock(generator->mutex_);
  *seed.mutable_data_ptr<int64_t>() = int64_t(generator->random64());
  return seed;
}

at::Tensor seed_meta(const at::Tensor& query) {
  return at::empty({1}, query.options().dtype(at::kLong));
}

at::Tensor refuse_seed(const at::Tensor& query) {
  TORCH_CHECK(query.defined(), "dropout_seed: query is an undefined tensor");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "dropout_seed: query is on ", query.device(),
                              ", but a plain dense CPU tensor is expected");
}

}  // namespace

at::Tensor dropout_seed(const at::Tensor& query) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("qkv::dropout_seed", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(query);
}

// An operator of its own, and not a part of attention_forward, so that a compiled program draws a
// new seed whenever it runs.
TORCH_LIBRARY_FRAGMENT(qkv, m) {
  using c10::DispatchKey;
  using torch::dispatch;
  m.def("dropout_seed(Tensor query) -> Tensor",
        {at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded});
  m.impl("dropout_seed", dispatch(DispatchKey::CPU, TORCH_FN(seed_cpu)));
  m.impl("dropout_seed", dispatch(DispatchKey::Meta, TORCH_FN(seed_meta)));
  // There is nothing to differentiate: it is an integer.
  m.impl("dropout_seed", dispatch(DispatchKey::Autograd, torch::CppFunction::makeFallthrough()));
  for (const DispatchKey key : kRefusedKeys)
    m.impl("dropout_seed", dispatch(key, TORCH_FN(refuse_seed)));
}

}  // namespace qkv::ops
