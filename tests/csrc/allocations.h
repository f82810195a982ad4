// Counts what the whole test program allocates with new; not under AddressSanitizer.
#pragma once

#include <cstdint>

namespace qkv::test {

int64_t allocations();  // so far, in all threads

}  // namespace qkv::test
