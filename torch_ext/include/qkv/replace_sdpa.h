// torch's own attention functions, computed by qkv: for models that are to stay as they are.
//
//   const auto replaced = qkv::replace_sdpa();  // until the end of the scope
//   auto output = model->forward(input);
//   for (const auto& count : qkv::sdpa_report()) std::cout << count.function << ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qkv/export.h"

namespace qkv {

// One replacement; it ends with this object.
class QKV_API ReplacedSdpa {
 public:
  ReplacedSdpa();
  ~ReplacedSdpa() { undo(); }
  ReplacedSdpa(ReplacedSdpa&& other) noexcept : active_(other.active_) { other.active_ = false; }
  ReplacedSdpa& operator=(ReplacedSdpa&& other) noexcept;

  void undo();                      // now; a second time it does nothing
  void keep() { active_ = false; }  // for as long as the process lives

 private:
  bool active_;
};

// From now on, in all threads of the process, at::scaled_dot_product_attention of CPU tensors is
// qkv::attention, whoever calls it: C++, TorchScript, Python, autograd or torch.func; and so is the
// attention in the inference paths of nn::MultiheadAttention and nn::TransformerEncoderLayer in
// Python and TorchScript (at::_native_multi_head_attention). What qkv does not cover goes to torch
// as before, and so does everything where flash attention is switched off
// (at::globalContext().setSDPUseFlash(false)).
//
// Replacements may overlap and nest, in any order and in several threads: torch's own kernels are
// back when the last one is undone. The first one and the last undo() change torch's table of
// kernels, so no other thread may be inside attention at that moment.
[[nodiscard]] QKV_API ReplacedSdpa replace_sdpa();

// How often a function has been called since the first of the replacements that are active, or were
// last, and who computed it: qkv, or torch for the reason given.
struct SdpaCount {
  std::string function;
  std::string left_to_torch_because;  // empty: taken by qkv
  int64_t calls;
};
// Those that were called at all.
QKV_API std::vector<SdpaCount> sdpa_report();

}  // namespace qkv
