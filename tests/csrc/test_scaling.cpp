// How calls would scale to 64 cores, on the real items with counted costs (benchmarks/scaling): the
// same on every machine.
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "allocations.h"
#include "cases.h"
#include "counted.h"
#include "dispatch/dispatch.h"
#include "shapes.h"
#include "simulator.h"

namespace qkv::test {
namespace {

class Scaling : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = active_isa();
    scaling::add_counted();
    set_isa("counted");
  }
  void TearDown() override { set_isa(before_.c_str()); }

  static scaling::Simulator::Result predict(const std::function<void()>& call) {
    scaling::Simulator simulator(scaling::counted);
    return simulator.observe(call);
  }
  // The share of the threads' time that is not lost.
  static double efficiency(const std::function<void(int)>& call, int threads) {
    const double alone = predict([&] { call(1); }).work;
    return alone / (threads * predict([&] { call(threads); }).duration);
  }

 private:
  std::string before_;
};

TEST_F(Scaling, SixtyFourCores) {
  // What is reached, rounded down: less is a step back. Of shapes that have little work for so many
  // cores (vit-s has 48 planes, of which no more than two threads work on one), less is asked for.
  const std::map<std::string, std::pair<double, double>> least = {
      {"vit-s", {.90, .84}}, {"bert", {.95, .90}},   {"gpt2", {.95, .90}},  {"base", {.95, .90}},
      {"long", {.95, .90}},  {"long1h", {.95, .85}}, {"llama", {.95, .85}}, {"sd-unet", {.95, .90}},
      {"tiny", {.95, .95}},  {"cross", {.95, .95}},  {"d256", {.95, .85}}};
  for (const scaling::Named& shape : scaling::kGrid) {
    const scaling::Call call(shape.shape);
    const auto [forward, backward] = least.at(shape.name);
    EXPECT_GE(efficiency([&](int threads) { call.forward(threads); }, 64), forward) << shape.name;
    EXPECT_GE(efficiency([&](int threads) { call.backward(threads); }, 64), backward) << shape.name;
  }
}

// However many threads there are, the work is all there, and does not take longer than on fewer.
TEST_F(Scaling, OneTo192Cores) {
  for (const char* shape : {"1x1x2048x2048x64", "1x6x1000x1000x64c", "2x8/2x700x700x32"}) {
    const scaling::Call call(shape);
    const double alone = predict([&] { call.backward(1); }).work;
    double before = HUGE_VAL;
    for (int threads : {1, 2, 4, 8, 16, 32, 64, 128, 192}) {
      const auto found = predict([&] { call.backward(threads); });
      EXPECT_GE(found.work, alone * 0.999) << shape << " " << threads;
      EXPECT_LE(found.work, alone * 1.3) << shape << " " << threads;
      EXPECT_LE(found.duration, before * 1.05) << shape << " " << threads;
      before = found.duration;
    }
  }
}

// Of packed documents, one long one among short ones does not keep threads waiting.
TEST_F(Scaling, OneLongDocumentAmongShortOnes) {
  std::vector<float> numbers(8192 * 64), sums(3 * numbers.size());
  Strides strides;
  strides.row = 64, strides.col = 1;
  Problem p;
  p.head_dim = p.head_dim_v = 64;
  p.query = p.key = p.value = {numbers.data(), strides};
  BackwardArgs args;
  args.output = args.grad_output = p.query;
  args.lse = {numbers.data(), {}};
  Output* const grads[] = {&args.grad_query, &args.grad_key, &args.grad_value};
  for (int n = 0; n < 3; ++n) *grads[n] = {sums.data() + n * numbers.size(), strides};
  for (const int64_t longest : {2048, 4096, 8192}) {
    // Nothing is computed, so that all documents may lie in the same rows.
    std::vector<Span> spans(400, {0, 300, 0, 300});
    spans[200] = {0, longest, 0, longest};
    p.batch_rank = 1, p.batch_sizes[0] = int64_t(spans.size()), p.spans = spans.data();
    const auto call = [&](int threads) {
      p.num_threads = threads;
      attention_backward(p, args);
    };
    EXPECT_GE(efficiency(call, 16), 0.9) << longest;
    EXPECT_GE(efficiency(call, 64), 0.75) << longest;
  }
}

// Beside the gradients a call takes no more than a quarter of their memory, or 32 MiB.
TEST_F(Scaling, MemoryOfAnyNumberOfThreads) {
#if defined(QKV_SANITIZER_ALLOCATES)
  GTEST_SKIP() << "a sanitizer allocates on its own";
#endif
  for (const scaling::Named& shape : scaling::kGrid) {
    const scaling::Call call(shape.shape);
    const int64_t most = std::max<int64_t>(int64_t{32} << 20, call.gradient_bytes() / 4);
    for (int threads : {1, 16, 64, 192}) {
      largest_workspace();
      predict([&] { call.backward(threads); });
      EXPECT_LE(largest_workspace(), most) << shape.name << " " << threads;
    }
  }
}

}  // namespace
}  // namespace qkv::test
