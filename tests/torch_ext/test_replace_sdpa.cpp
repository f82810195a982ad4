// qkv::replace_sdpa in a program without Python.
#include "qkv/replace_sdpa.h"

#include "common.h"

namespace qkv::test::replace_sdpa_tests {
namespace {

class ReplaceSdpa : public testing::Test {
 protected:
  // How many calls qkv has computed, and torch.
  static std::pair<int64_t, int64_t> counts() {
    std::pair<int64_t, int64_t> counts;
    for (const SdpaCount& count : sdpa_report())
      (count.left_to_torch_because.empty() ? counts.first : counts.second) += count.calls;
    return counts;
  }
  at::Tensor sdpa() const { return at::scaled_dot_product_attention(query, key, value); }

  at::Tensor query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8}), value = randn({2, 3, 7, 4});
};

TEST_F(ReplaceSdpa, EndsWithItsScope) {
  {
    const auto replaced = replace_sdpa();
    EXPECT_TRUE(at::equal(sdpa(), attention(query, key, value)));
    EXPECT_EQ(counts(), std::pair(int64_t(1), int64_t(0)));
    EXPECT_NE(sdpa().grad_fn()->name().find("AttentionBackward"), std::string::npos);
  }
  EXPECT_EQ(sdpa().grad_fn()->name().find("AttentionBackward"), std::string::npos);
  EXPECT_EQ(counts().first, 2);  // the report stays
}

TEST_F(ReplaceSdpa, NestsMovesAndIsUndoneOnce) {
  auto outer = replace_sdpa();
  {
    auto inner = replace_sdpa();
    outer = std::move(inner);
  }  // one of the two is gone
  sdpa();
  EXPECT_EQ(counts().first, 1);
  outer.undo();
  outer.undo();
  sdpa();
  EXPECT_EQ(counts().first, 1);
}

TEST_F(ReplaceSdpa, OutlivesWhatItWasMovedFrom) {
  auto source = std::make_unique<ReplacedSdpa>(replace_sdpa());
  const ReplacedSdpa moved(std::move(*source));
  source.reset();
  sdpa();
  EXPECT_EQ(counts().first, 1);
}

TEST_F(ReplaceSdpa, LeavesToTorchWhatIsSwitchedOff) {
  const auto replaced = replace_sdpa();
  at::globalContext().setSDPUseFlash(false);
  const auto left = sdpa();
  at::globalContext().setSDPUseFlash(true);
  expect_close(left, sdpa(), 1e-12);
  EXPECT_EQ(counts(), std::pair(int64_t(1), int64_t(1)));
  EXPECT_EQ(sdpa_report()[0].function, "scaled_dot_product_attention");
}

}  // namespace
}  // namespace qkv::test::replace_sdpa_tests
