// qkv::replace_sdpa: kernels of ours in torch's table, for as long as somebody wants them there.
#include <torch/library.h>

#include <memory>
#include <mutex>

#include "qkv/replace_sdpa.h"
#include "replace/kernels.h"

namespace qkv {
namespace replace {
namespace {

// Says nothing: torch warns whoever registers a kernel where there is one.
class Silent : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::unique_ptr<torch::Library> registered() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", std::nullopt,
                                                  __FILE__, __LINE__);
  using c10::DispatchKey;
  // The first is what all keys have that have no kernel of their own, and what tracers decompose
  // the operator by; vmap has its own two.
  for (const DispatchKey key : {DispatchKey::CompositeImplicitAutograd,
                                DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchVmapMode})
    library->impl("scaled_dot_product_attention", torch::dispatch(key, TORCH_FN(attention)));
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::NestedTensorCPU})
    library->impl("_native_multi_head_attention",
                  torch::dispatch(key, TORCH_FN(multi_head_attention)));
  return library;
}

// How many replacements are active, and the kernels if there are any.
struct State {
  std::mutex mutex;
  int64_t active = 0;
  std::unique_ptr<torch::Library> kernels;
};

// It outlives everything: a replacement that is kept is never taken back.
State& state() {
  static State* const state = new State;
  return *state;
}

// Both return how many replacements are active then.
int64_t begin() {
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().active == 0) {
    reset_counts();
    state().kernels = registered();
  }
  return ++state().active;
}

int64_t end() {
  std::lock_guard<std::mutex> lock(state().mutex);
  TORCH_CHECK(state().active > 0, "replace_sdpa: nothing is replaced");
  if (--state().active == 0) state().kernels.reset();
  return state().active;
}

std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>> report() {
  std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int64_t>> columns;
  for (SdpaCount& count : sdpa_report()) {
    std::get<0>(columns).push_back(std::move(count.function));
    std::get<1>(columns).push_back(std::move(count.left_to_torch_because));
    std::get<2>(columns).push_back(count.calls);
  }
  return columns;
}

}  // namespace

// Behind qkv.replace_sdpa() and qkv.sdpa_report().
TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_replace_sdpa() -> int", &begin);
  m.def("_restore_sdpa() -> int", &end);
  m.def("_sdpa_report() -> (str[] functions, str[] reasons, int[] calls)", &report);
}

}  // namespace replace

ReplacedSdpa::ReplacedSdpa() : active_(true) { replace::begin(); }

ReplacedSdpa& ReplacedSdpa::operator=(ReplacedSdpa&& other) noexcept {
  std::swap(active_, other.active_);
  return *this;
}

void ReplacedSdpa::undo() {
  if (active_) replace::end();
  active_ = false;
}

ReplacedSdpa replace_sdpa() { return {}; }

}  // namespace qkv
