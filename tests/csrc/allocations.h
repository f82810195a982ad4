// Counts what the whole test program allocates with new; not under the sanitizers that have
// operators of their own.
#pragma once

#include <cstdint>

// __SANITIZE_ADDRESS__ and __SANITIZE_THREAD__ are GCC's.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__
#endif
#if __has_feature(thread_sanitizer) && !defined(__SANITIZE_THREAD__)
#define __SANITIZE_THREAD__
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define QKV_SANITIZER_ALLOCATES
#endif

namespace qkv::test {

int64_t allocations();  // so far, in all threads
// Bytes of the largest block of memory since the last call that was allocated with an alignment
// of its own, as the workspace of a call is (csrc/common/workspace.h).
int64_t largest_workspace();

}  // namespace qkv::test
