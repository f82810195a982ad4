// Where reproducible(), results have the same bits on every instruction set, and a row has those
// that it has alone (csrc/kernels/fixed_bits.h). That they are right, the tests of every pass say,
// which run on one of these instruction sets, too (tested_isas in cases.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "cases.h"
#include "double_workload.h"
#include "families.h"
#include "jvp_workload.h"

namespace qkv::test {
namespace {

class FixedBits : public ::testing::Test {
 protected:
  void SetUp() override { set_reproducible(true); }
  void TearDown() override {
    set_reproducible(false);
    set_isa(supported_isas().front());
  }

  // Generic code first, against which the others are held: it multiplies and adds by the C library
  // where the compiler was not promised an FMA, and so is slow.
  static std::vector<const char*> isas() {
    std::vector<const char*> all = tested_isas();
    std::reverse(all.begin(), all.end());
    std::stable_partition(all.begin(), all.end(),
                          [](const char* isa) { return std::string(isa) == "generic"; });
    return all;
  }

  // expect(result of compute(), that of the first instruction set) on every other one.
  template <class Compute, class Expect>
  static void on_every_isa(const Compute& compute, const Expect& expect) {
    set_isa(isas().front());
    const auto first = compute();
    for (const char* isa : isas()) {
      SCOPED_TRACE(isa);
      set_isa(isa);
      expect(compute(), first);
    }
  }
};

TEST_F(FixedBits, EveryInstructionSetAndAnyNumberOfThreads) {
  for (int seed = 0; seed < (kQuick ? 150 : 1000) && !HasFailure(); ++seed) {
    Workload w(random_case(uint64_t(seed)));
    SCOPED_TRACE(::testing::Message() << w.c);
    on_every_isa(
        [&] {
          w.c.num_threads = w.c.num_threads % 5 + 1;
          return run(w);
        },
        [](const Results& a, const Results& b) { expect_identical(a, b); });
  }
}

TEST_F(FixedBits, SecondDerivatives) {
  for (int seed = 0; seed < (kQuick ? 40 : 300) && !HasFailure(); ++seed) {
    Case c = random_case(uint64_t(seed));
    c.grad_weights = c.weights = false;
    const JvpWorkload w(c);
    SCOPED_TRACE(::testing::Message() << c);
    on_every_isa([&] { return run_double(w); },
                 [](const Results& a, const Results& b) { expect_identical(a, b); });
    on_every_isa([&] { return run_jvp(w); },
                 [](const JvpResults& a, const JvpResults& b) { expect_same_bits(a, b); });
  }
}

TEST_F(FixedBits, HardAttention) {
  for (int seed = 0; seed < (kQuick ? 30 : 300) && !HasFailure(); ++seed) {
    const Workload w(random_case(uint64_t(seed)));
    on_every_isa([&] { return run_hard(w); },
                 [](const Results& a, const Results& b) { expect_identical(a, b); });
  }
}

// FNV-1a of the bits of all results.
uint64_t hash_of(const Results& results, uint64_t hash) {
  for (const NamedResult& r : kResults)
    for (const double x : results.*r.values) {
      uint64_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      for (int byte = 0; byte < 8; ++byte, bits >>= 8)
        hash = (hash ^ (bits & 0xff)) * 0x100000001b3;
    }
  return hash;
}

// On 64-bit Arm as on x86-64.
TEST_F(FixedBits, OfEveryArchitecture) {
  uint64_t hash = 0xcbf29ce484222325;
  for (Case c : cases_for_threads(150)) {
    c.batch = {}, c.grad_sinks = c.sinks, c.grad_alibi_slopes = c.alibi_slopes;
    hash = hash_of(run(Workload(c)), hash);
  }
  EXPECT_EQ(hash, 12783398794458892938u);
}

// The last `count` rows of `all`, whose place in the whole a Shard says.
Workload last_rows(const Workload& all, int64_t count) {
  Case c = all.c;
  const int64_t left_out = c.L - count;
  if (c.shard.seqlen_q == 0) c.shard.seqlen_q = c.L;
  if (c.shard.seqlen_k == 0) c.shard.seqlen_k = c.S;
  if (c.shard.heads == 0) c.shard.heads = c.heads();
  c.shard.query_offset += left_out;
  c.L = count;
  Workload last(c);
  for (size_t n = 0; n < all.inputs().size(); ++n) {
    const Tensor& from = *all.inputs()[n];
    if (!from) continue;
    Tensor& to = *last.inputs()[n];
    const Sizes sizes = from.sizes();
    const int64_t cols = sizes.back(), rows = sizes[sizes.size() - 2];
    const bool is_by_row =
        rows == all.c.L && to.sizes()[sizes.size() - 2] == count && to.numel() != from.numel();
    for (int64_t i = 0, written = 0; i < from.numel(); ++i)
      if (!is_by_row || i / cols % rows >= left_out) to.set(written++, from.get(i));
  }
  return last;
}

// Of what is [B..., H, L, cols], the last `count` of L rows.
std::vector<double> rows_of(const std::vector<double>& all, int64_t L, int64_t count,
                            int64_t cols) {
  std::vector<double> rows;
  for (size_t i = 0; i < all.size(); ++i)
    if (int64_t(i) / cols % L >= L - count) rows.push_back(all[i]);
  return rows;
}

TEST_F(FixedBits, SomeRowsAloneAndAmongOthers) {
  for (int seed = 0; seed < (kQuick ? 100 : 1000) && !HasFailure(); ++seed) {
    Case c = random_case(uint64_t(seed));
    c.strided = false;
    for (int64_t count : {1, 3, 40}) {
      if (count >= c.L) continue;
      const char* const isa = isas()[size_t(seed) % isas().size()];
      set_isa(isa);
      const Workload all(c);
      const Results among = run(all), alone = run(last_rows(all, count));
      SCOPED_TRACE(::testing::Message() << count << " rows of " << c << " on " << isa);
      expect_same_bits(alone.output, rows_of(among.output, c.L, count, c.Dv));
      expect_same_bits(alone.lse, rows_of(among.lse, c.L, count, 1));
      expect_same_bits(alone.grad_query, rows_of(among.grad_query, c.L, count, c.D));
    }
  }
}

// The second key's weight times its value is too small for a number, and negative. Whether a zero
// is added to it depends on how many keys other rows see.
TEST_F(FixedBits, NoSumOfProductsIsNegativeZero) {
  Case c = small_case();
  c.dtype = DType::f32, c.is_causal = true, c.scale = 1;
  c.D = c.Dv = 1;
  for (c.L = 2; c.L <= 3; ++c.L) {
    c.S = c.L;
    Workload w(c);
    w.query.fill([] { return 1; });
    for (int64_t key = 0; key < c.S; ++key) {
      w.key.set(key, std::vector{0., -87., -200.}[size_t(key)]);
      w.value.set(key, std::vector{0., -1e-8, 1.}[size_t(key)]);
    }
    on_every_isa([&] { return run(w); },
                 [](const Results& a, const Results& b) {
                   expect_identical(a, b);
                   for (double x : a.output) EXPECT_FALSE(std::signbit(x));
                 });
  }
}

TEST(Reproducible, IsAskedForByCallers) {
  EXPECT_FALSE(reproducible());
  set_reproducible(true);
  Workload w(small_case());
  EXPECT_EQ(score_way_of(w.problem()), ScoreWay::fixed);
  set_reproducible(false);
  EXPECT_NE(score_way_of(w.problem()), ScoreWay::fixed);
}

}  // namespace
}  // namespace qkv::test
