// What the replacement takes and what it leaves to torch, counted.
#include <array>
#include <atomic>

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

}  // namespace

void count(Function function, Outcome outcome) {
  counts[int(function)][int(outcome)].fetch_add(1, std::memory_order_relaxed);
}

void reset_counts() {
  for (auto& of_function : counts)
    for (auto& calls : of_function) calls.store(0, std::memory_order_relaxed);
}

}  // namespace replace

std::vector<SdpaCount> sdpa_report() {
  std::vector<SdpaCount> report;
  for (int function = 0; function < replace::kFunctions; ++function)
    for (int outcome = 0; outcome < replace::kOutcomes; ++outcome)
      if (const int64_t calls = replace::counts[function][outcome].load(std::memory_order_relaxed))
        report.push_back({replace::kFunctionNames[function], replace::kReasons[outcome], calls});
  return report;
}

}  // namespace qkv
