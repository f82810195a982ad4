// What the replacement takes and what it leaves to torch, counted.
#pragma once

#include <cstdint>

namespace qkv::replace {

// The functions of torch that are replaced.
enum class Function : int8_t { attention, multi_head, count };

// Who computes a call: qkv (taken), or torch for one of these reasons.
enum class Outcome : int8_t { taken, elsewhere, no_flash, nested, dtype, refused, count };

// Any thread may call it at any time.
void count(Function function, Outcome outcome);
void reset_counts();

}  // namespace qkv::replace
