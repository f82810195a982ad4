// Counts the allocations of the whole test program by operator new. Under sanitizers that have such
// operators of their own, it counts nothing.
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
// The bytes of the largest allocation since the last call of this function, among those with an
// alignment of their own, as the workspace of a call is (csrc/common/workspace.h).
int64_t largest_workspace();

}  // namespace qkv::test
