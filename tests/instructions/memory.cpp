// malloc and free of qkv_instructions, for one thread: a list of free blocks for each power of two.
//
// What glibc's malloc costs a small call differs by 3 % with what was allocated before it. Here an
// allocation costs the same whatever came before, and a call gets the memory that it gave back the
// last time.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define QKV_REPLACED extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kLine = 64;

// Lies right before the memory that is handed out, which begins at `begin` or, to be aligned,
// later.
struct Block {
  void* begin;
  size_t bytes;  // from `begin`; a power of two
};

alignas(kLine) char arena[size_t(1) << 29];
size_t used = 0;
void* free_blocks[64];  // the `begin` of one; there stands the next one's

Block& block_of(void* data) { return static_cast<Block*>(data)[-1]; }

void* allocate(size_t bytes) {
  const int list = 64 - __builtin_clzll((bytes < kLine ? kLine : bytes) - 1);
  if (void* const begin = free_blocks[list]) {
    std::memcpy(&free_blocks[list], begin, sizeof(void*));
    return begin;
  }
  if (list >= 29 || used + kLine + (size_t(1) << list) > sizeof(arena)) return nullptr;
  void* const begin = arena + used + kLine;
  used += kLine + (size_t(1) << list);
  block_of(begin) = {begin, size_t(1) << list};
  return begin;
}

}  // namespace

QKV_REPLACED void* malloc(size_t bytes) { return allocate(bytes); }

QKV_REPLACED void free(void* data) {
  if (!data) return;
  const Block block = block_of(data);
  void*& list = free_blocks[__builtin_ctzll(block.bytes)];
  std::memcpy(block.begin, &list, sizeof(void*));
  list = block.begin;
}

QKV_REPLACED void* calloc(size_t count, size_t bytes) {
  void* const data = allocate(count * bytes);
  return data ? std::memset(data, 0, count * bytes) : nullptr;
}

QKV_REPLACED size_t malloc_usable_size(void* data) {
  if (!data) return 0;
  const Block block = block_of(data);
  return block.bytes - size_t(static_cast<char*>(data) - static_cast<char*>(block.begin));
}

QKV_REPLACED void* realloc(void* old, size_t bytes) {
  const size_t room = malloc_usable_size(old);
  if (old && bytes <= room) return old;
  void* const data = allocate(bytes);
  if (!old || !data) return data;
  std::memcpy(data, old, room);
  free(old);
  return data;
}

QKV_REPLACED void* aligned_alloc(size_t alignment, size_t bytes) {
  if (alignment <= kLine) return allocate(bytes);
  void* const begin = allocate(bytes + alignment);
  if (!begin) return nullptr;
  void* const data =
      reinterpret_cast<void*>((uintptr_t(begin) + alignment - 1) / alignment * alignment);
  block_of(data) = block_of(begin);
  return data;
}
QKV_REPLACED void* memalign(size_t alignment, size_t bytes) {
  return aligned_alloc(alignment, bytes);
}
QKV_REPLACED int posix_memalign(void** data, size_t alignment, size_t bytes) {
  return (*data = aligned_alloc(alignment, bytes)) ? 0 : ENOMEM;
}
