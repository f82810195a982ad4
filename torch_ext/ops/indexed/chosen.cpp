#include "ops/indexed/indexed.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "call/check.h"

namespace qkv::ops {
namespace {

// Fewer queries have fewer keys between them, more make fuller tiles: 64 rows are a few tiles of
// the kernels for each head.
constexpr int64_t kBlockQueries = 64;

// How many pieces of `work` steps each a thread takes at least: 32768 steps, as torch's operators
// have it, since to wake another thread takes as long as some ten thousand.
int64_t grain_of(int64_t work) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work)); }

}  // namespace

ChosenKeys chosen_keys(const Call& call) {
  const at::Tensor &query = call[arg::query], &given = call[arg::indices];
  const int64_t B = query.size(0), L = query.size(2), S = call[arg::key].size(2);
  const int64_t G = given.dim() == 4 ? given.size(1) : 1, k = given.size(-1);
  const at::AutoDispatchBelowADInplaceOrView below;  // integers have no gradients
  const at::Tensor indices = (given.dim() == 4 ? given : given.unsqueeze(1))
                                 .expand({B, G, L, k})
                                 .to(at::kLong)
                                 .contiguous();
  ChosenKeys chosen{at::empty({B * G * L, k}, indices.options()),
                    at::empty({B * G * L}, indices.options())};
  // No wider than all there is, so that sums do not overflow.
  const auto side = [&](const c10::SymInt& n) {
    const int64_t keys = n.guard_int(__FILE__, __LINE__);
    return keys < 0 ? L + S : std::min(keys, L + S);
  };
  const int64_t left = side(call.options.window_size.left);
  const int64_t right = side(call.options.window_size.right);
  const bool is_causal = call.options.is_causal;
  at::Tensor mask = call[arg::attn_mask];
  if (mask.defined()) mask = mask.expand({B, 1, L, S});
  const int64_t* const from = indices.const_data_ptr<int64_t>();
  int64_t* const to = chosen.keys.mutable_data_ptr<int64_t>();
  int64_t* const counts = chosen.counts.mutable_data_ptr<int64_t>();
  at::parallel_for(0, B * G * L, grain_of(k + S / 64), [&](int64_t begin, int64_t end) {
    std::vector<uint64_t> seen(S / 64 + 1);  // a bit for each key
    for (int64_t row = begin; row < end; ++row) {
      const int64_t item = row / L / G, place = row % L;
      const int64_t aligned = place + S - L;  // the key beside the query, bottom-right
      const int64_t lowest = std::max<int64_t>(0, aligned - left);
      const int64_t highest = std::min(aligned + right, is_causal ? place : S - 1);
      const auto is_hidden = [&](int64_t key) {
        if (key < lowest || key > highest) return true;
        if (!mask.defined()) return false;
        const auto strides = mask.strides();
        return !mask.const_data_ptr<bool>()[item * strides[0] + place * strides[2] +
                                            key * strides[3]];
      };
      for (int64_t i = row * k; i < (row + 1) * k; ++i) {
        const int64_t key = from[i];
        TORCH_CHECK(key < S, call.title(), ": indices has the number ", key, ", but key has ", S,
                    " keys; expected numbers below that, or -1 for none");
        if (!is_hidden(key)) seen[key / 64] |= uint64_t(1) << key % 64;
      }
      int64_t* next = to + row * k;
      int64_t first = row / L * S;
      for (uint64_t& bits : seen) {
        for (; bits != 0; bits &= bits - 1) *next++ = first + __builtin_ctzll(bits);
        first += 64;
      }
      counts[row] = next - (to + row * k);
      std::fill(next, to + (row + 1) * k, 0);
    }
  });
  return chosen;
}

std::vector<ChosenBlock> blocks_of_queries(const ChosenKeys& chosen, int64_t L, int64_t seqlen_k) {
  const int64_t B = chosen.keys.size(0) / L, k = chosen.keys.size(1);
  std::vector<ChosenBlock> blocks;
  for (int64_t item = 0; item < B; ++item)
    for (int64_t begin = 0; begin < L; begin += kBlockQueries)
      blocks.push_back({item, begin, std::min(begin + kBlockQueries, L), {}, {}});
  const int64_t* const keys = chosen.keys.const_data_ptr<int64_t>();
  const int64_t* const counts = chosen.counts.const_data_ptr<int64_t>();
  const int64_t grain = grain_of(seqlen_k + kBlockQueries * k);
  at::parallel_for(0, int64_t(blocks.size()), grain, [&](int64_t first, int64_t last) {
    std::vector<int64_t> place(seqlen_k);
    for (int64_t number = first; number < last; ++number) {
      ChosenBlock& block = blocks[number];
      const auto for_each = [&](const auto& visit) {
        for (int64_t query = block.begin; query < block.end; ++query)
          for (int64_t i = 0, row = block.item * L + query; i < counts[row]; ++i)
            visit(query - block.begin, keys[row * k + i] - block.item * seqlen_k);
      };
      std::fill(place.begin(), place.end(), -1);
      for_each([&](int64_t, int64_t key) { place[key] = 0; });
      std::vector<int64_t> all;
      for (int64_t key = 0; key < seqlen_k; ++key) {
        if (place[key] < 0) continue;
        place[key] = int64_t(all.size());
        all.push_back(key);
      }
      const auto n = int64_t(all.size());
      block.keys = at::empty({n}, chosen.keys.options());
      std::copy(all.begin(), all.end(), block.keys.mutable_data_ptr<int64_t>());
      block.mask = at::zeros({block.end - block.begin, n}, chosen.keys.options().dtype(at::kBool));
      bool* const mask = block.mask.mutable_data_ptr<bool>();
      for_each([&](int64_t row, int64_t key) { mask[row * n + place[key]] = true; });
    }
  });
  return blocks;
}

}  // namespace qkv::ops
