// Copies key and value behind the keys and values that a cache has; to int8 caches as int8.
#pragma once

#include "ops/kvcache/rows.h"

namespace qkv::ops {

// Throws c10::Error, before anything is written, unless the caches are memory of their own.
void append(const Call& call, const CacheRows& rows, int num_threads);

}  // namespace qkv::ops
