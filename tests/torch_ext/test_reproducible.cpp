// qkv::ReproducibleGuard: csrc and Python have the tests of what it promises.
#include "qkv/reproducible.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "qkv/attention.h"

namespace qkv::test_reproducible {
namespace {

bool reproducible() {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("qkv::_reproducible", "");
  return op.typed<bool()>().call();
}

TEST(ReproducibleGuard, ForAsLongAsItLives) {
  EXPECT_FALSE(reproducible());
  {
    const ReproducibleGuard same;
    EXPECT_TRUE(reproducible());
    {
      const ReproducibleGuard any(false);
      EXPECT_FALSE(reproducible());
    }
    EXPECT_TRUE(reproducible());
  }
  EXPECT_FALSE(reproducible());
}

TEST(ReproducibleGuard, OneQueryAmongManyAndAlone) {
  const at::Tensor query = at::randn({1, 2, 40, 64}), key = at::randn({1, 2, 700, 64});
  const ReproducibleGuard same;
  const at::Tensor all = attention(query, key, key);
  EXPECT_TRUE(at::equal(attention(query.slice(2, 39), key, key), all.slice(2, 39)));
}

}  // namespace
}  // namespace qkv::test_reproducible
