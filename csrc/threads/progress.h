// Items that wait for each other: numbers that one thread counts up and others wait for.
//
// An item may wait for items before it in the list of its job, and only for these: threads take
// items in the order of the list, so whatever an item waits for is done, or some thread has it, and
// the first one that is not done has nothing to wait for.
#pragma once

#include <atomic>
#include <cstdint>

namespace qkv {

using Number = std::atomic<int32_t>;

// Waits until the number is at least so large. What the thread that made it so has written before
// is then visible.
void wait_for(const Number& number, int32_t least);

// For one thread at a time; `value` is larger than what the number was.
void advance(Number& number, int32_t value);

// For any thread at any time: adds 1, and returns the sum.
int32_t add_one(Number& number);

}  // namespace qkv
