// Families of cases in which more than one pass is held against the reference: check(c) for each.
#pragma once

#include "cases.h"
#include "jvp_workload.h"

namespace qkv::test {

// L and S grow one by one, so that tiles of every instruction set have every remainder.
template <class Check>
void for_every_length(int64_t most, const Check& check) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.D = 3, c.Dv = 2;
    for (int64_t n = 0; n <= most && !::testing::Test::HasFailure(); n += kQuick ? 7 : 1) {
      c.L = n, c.S = 5, check(c);
      c.L = 5, c.S = n, check(c);
    }
  }
}

template <class Check>
void for_every_head_dim(int64_t step, const Check& check) {
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 3, c.S = 5, c.scale = 0.3;
    for (int64_t n = 0; n <= 300 && !::testing::Test::HasFailure(); n += kQuick ? 7 : step) {
      c.D = n, c.Dv = 5, check(c);
      c.D = 5, c.Dv = n, check(c);
    }
  }
}

// Any of the directions may be absent: check(c, along).
template <class Check>
void for_absent_directions(const Check& check) {
  for (DType dtype : kDTypes) {
    for (int along = 0; along <= kAlongAll; along += kQuick ? 5 : 1) {
      Case c;
      c.dtype = dtype, c.L = 20, c.S = 40, c.group = 2, c.is_causal = along % 3 == 0;
      c.mask_type = along % 2 ? float_masks(dtype).back() : MaskType::f32;
      c.bias_type = MaskType::f32;
      c.alibi_slopes = c.sinks = true;
      c.softcap = along % 2, c.dropout_p = along % 5 == 0 ? 0.3 : 0;
      check(c, along);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

template <class Check>
void for_causal(const Check& check) {
  for (int64_t L : {1, 20, 70, 150}) {
    for (int64_t S : {1, 19, 70, 151}) {
      for (int64_t group : {1, 3}) {
        Case c;
        c.L = L, c.S = S, c.group = group, c.is_causal = true;
        check(c);
      }
    }
  }
}

template <class Check>
void for_causal_and_windows(std::initializer_list<int64_t> seqlens_k, const Check& check) {
  for (int64_t L : {1, 20, 70, 150}) {
    for (int64_t S : seqlens_k) {
      for (int64_t left : {-1, 0, 40}) {
        Case c;
        c.L = L, c.S = S, c.group = L % 3 + 1, c.is_causal = true, c.window_left = left;
        check(c);
        c.dtype = DType::bf16, c.is_causal = false, c.window_right = 3;
        check(c);
      }
    }
  }
}

// A mask that broadcasts over every set of its dimensions.
template <class Check>
void for_broadcast_masks(const Check& check) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (int broadcast = 0; broadcast < 16; ++broadcast) {
        Case c;
        c.dtype = dtype, c.batch = {2}, c.kv_heads = 2, c.group = 2, c.L = 18, c.S = 37;
        c.mask_type = mask, c.mask_strides = dense_strides({2, 4, 18, 37});
        for (int d = 0; d < 4; ++d)
          if (broadcast >> d & 1) c.mask_strides[d] = 0;
        check(c);
      }
    }
  }
}

// check(clean, dirty): in the second, keys that no query sees are NaN or infinite, and so are their
// directions and those of the mask. No result may be another one.
template <class Check>
void for_hidden_keys(const Check& check) {
  for (DType dtype : kDTypes) {
    for (MaskType mask : all_masks(dtype)) {
      for (double poison : {kNaN, kInf}) {
        for (int64_t S : {7, 40, 300}) {
          Case c;
          c.dtype = dtype, c.L = 21, c.S = S, c.group = 2, c.mask_type = mask;
          c.softcap = S == 40 ? 3 : 0;
          JvpWorkload clean(c), dirty(c);
          for (int64_t j = 0; j < S; j += 3) {
            for (int64_t h = 0; h < 2; ++h)
              for (int64_t i = 0; i < c.L; ++i) {
                for (JvpWorkload* w : {&clean, &dirty})
                  w->mask.set({h, i, j}, mask == MaskType::boolean ? 0 : -kInf);
                if (dirty.mask_jvp) dirty.mask_jvp.set({h, i, j}, poison);
              }
            for (Tensor* t : {&dirty.key, &dirty.value, &dirty.key_jvp, &dirty.value_jvp})
              for (int64_t d = 0; d < t->sizes().back(); ++d)
                if ((j + d) % 2 == 0) t->set({0, j, d}, poison);
          }
          SCOPED_TRACE(::testing::Message() << c << " poison " << poison);
          check(clean, dirty);
          if (::testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// A small case with any options, in which one element of a tensor will not be finite (poison).
inline Case draw_small_case(Random& random, int seed) {
  Case c;
  c.seed = uint64_t(seed), c.dtype = draw_dtype(random), c.group = draw(random, 1, 2);
  c.L = draw(random, 1, 40), c.S = draw(random, 1, 150);
  c.D = draw(random, 1, 20), c.Dv = draw(random, 1, 20);
  draw_options(random, c);
  return c;
}
inline void poison(Random& random, const std::vector<Tensor*>& tensors) {
  std::vector<Tensor*> all;
  for (Tensor* t : tensors)
    if (*t) all.push_back(t);
  Tensor& t = *draw_from(random, all);
  t.set(draw(random, 0, t.numel() - 1), draw_from<double>(random, {kNaN, kInf, -kInf}));
}

// Cases whose work is cut for several threads. `S`: the keys of the causal ones.
inline std::vector<Case> cases_for_threads(int64_t S) {
  Case heads;
  heads.batch = {8}, heads.kv_heads = 3, heads.group = 2;
  heads.L = 70, heads.S = 90, heads.D = 40, heads.Dv = 24;
  Case causal;
  causal.batch = {8}, causal.L = 200, causal.S = S, causal.D = causal.Dv = 32;
  causal.is_causal = true, causal.mask_type = MaskType::f32;
  std::vector<Case> all;
  for (Case c : {heads, causal}) {
    all.push_back(c);
    c.dtype = DType::f64, c.sinks = c.alibi_slopes = true;
    c.window_left = 50, c.softcap = 2, c.dropout_p = 0.3;
    all.push_back(c);
    c.dtype = DType::bf16;
    all.push_back(c);
  }
  return all;
}

}  // namespace qkv::test
