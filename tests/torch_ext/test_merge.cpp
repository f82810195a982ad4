// qkv::merge makes attention over all keys of attention over parts of them.
#include "qkv/merge.h"

#include "common.h"

namespace qkv::test::merge_tests {
namespace {

TEST(Merge, AllKeys) {
  const at::Tensor query = randn({2, 5, 8}), key = randn({2, 9, 8}), value = randn({2, 9, 6});
  const auto attend = [&](int64_t begin, int64_t end) {
    return attention_with_lse(query, key.slice(1, begin, end), value.slice(1, begin, end));
  };
  const auto [left, left_lse] = attend(0, 4);
  const auto [right, right_lse] = attend(4, 9);
  const auto [output, lse] = merge({left, right}, {left_lse, right_lse});
  const auto [expected, expected_lse] = attend(0, 9);
  expect_close(output, expected, 1e-12);
  expect_close(lse, expected_lse, 1e-12);

  const auto gradients = [&](const at::Tensor& of) {
    return torch::autograd::grad({of.sin().sum()}, {query, key, value}, {}, true);
  };
  expect_close(gradients(output), gradients(expected), 1e-12);
}

TEST(Merge, NamesWhatIsWrong) {
  const at::Tensor output = at::zeros({2, 3});
  try {
    merge({output}, {output});
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_EQ(error.msg(),
              "merge: lses[0] is [2, 3], but [2] is expected, a number for each row of outputs");
  }
}

}  // namespace
}  // namespace qkv::test::merge_tests
