// qkv::replace_sdpa: kernels of ours in torch's table, for as long as somebody wants them there,
// and counts of what they take and what they leave to torch.
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>

#include "qkv/replace_sdpa.h"
#include "replace/kernels.h"

namespace qkv {
namespace replace {
namespace {

constexpr int kFunctions = int(Function::count), kOutcomes = int(Outcome::count);

constexpr std::array<const char*, kFunctions> kFunctionNames = {"scaled_dot_product_attention",
                                                                "_native_multi_head_attention"};
constexpr std::array<const char*, kOutcomes> kReasons = {
    "",
    "the tensors are not on the CPU",
    "flash attention is switched off, by sdpa_kernel() say",
    "nested tensors",
    "not float32, float64, bfloat16 or float16",
    "arguments that qkv refuses, and most of which torch refuses, too",
};

std::array<std::array<std::atomic<int64_t>, kOutcomes>, kFunctions> counts;

// Whether to say, too, what is counted as left to torch, the first time: QKV_VERBOSE=1.
bool is_verbose() {
  static const bool is_on = [] {
    const char* const value = std::getenv("QKV_VERBOSE");
    return value && *value && std::string_view(value) != "0";
  }();
  return is_on;
}

void reset_counts() {
  for (auto& of_function : counts)
    for (auto& calls : of_function) calls.store(0, std::memory_order_relaxed);
}

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
    library->impl("scaled_dot_product_attention", torch::dispatch(key, attention_kernel()));
  for (const DispatchKey key : {DispatchKey::CPU, DispatchKey::NestedTensorCPU})
    library->impl("_native_multi_head_attention", torch::dispatch(key, multi_head_kernel()));
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

void count(Function function, Outcome outcome) {
  const int64_t before =
      counts[int(function)][int(outcome)].fetch_add(1, std::memory_order_relaxed);
  if (before == 0 && outcome != Outcome::taken && is_verbose())
    TORCH_WARN("qkv: ", kFunctionNames[int(function)],
               " is left to torch: ", kReasons[int(outcome)]);
}

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

std::vector<SdpaCount> sdpa_report() {
  std::vector<SdpaCount> report;
  for (int function = 0; function < replace::kFunctions; ++function)
    for (int outcome = 0; outcome < replace::kOutcomes; ++outcome)
      if (const int64_t calls = replace::counts[function][outcome].load(std::memory_order_relaxed))
        report.push_back({replace::kFunctionNames[function], replace::kReasons[outcome], calls});
  return report;
}

}  // namespace qkv
