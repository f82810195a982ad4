// AMX's registers and instructions, on any CPU. As on AMX itself, using a register that is not
// configured ends the program.
#pragma once

#include "emulated/vec.h"

namespace qkv::QKV_ISA {

struct TileFile {
  bool configured = false;
  uint32_t tile[8][16][16] = {};
};
inline thread_local TileFile tile_file;

struct Tiles {
  static void configure() { tile_file = {true, {}}; }
  static void release() { tile_file = {}; }

  template <int tile>
  static void zero() {
    std::memset(at(tile), 0, sizeof tile_file.tile[tile]);
  }
  template <int tile>
  static void load(const void* p, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(at(tile)[i], static_cast<const char*>(p) + i * row_bytes, 64);
  }
  template <int tile>
  static void store(void* p, int64_t row_bytes) {
    for (int i = 0; i < 16; ++i)
      std::memcpy(static_cast<char*>(p) + i * row_bytes, at(tile)[i], 64);
  }
  // tdpbf16ps: the first numbers of the pairs have one sum and the second numbers another, each of
  // which begins with zero. The two sums are added up, and the result is added to the tile.
  template <int sum, int a, int b>
  static void dot() {
    static_assert(sum != a && sum != b && a != b);
    for (int i = 0; i < 16; ++i) {
      Floats firsts{}, seconds{}, total;
      for (int k = 0; k < 16; ++k) {
        FloatBits row;
        std::memcpy(&row, at(b)[k], sizeof row);
        const FloatBits pair = at(a)[i][k] - FloatBits{};
        firsts = add_product_flushed(first_of(pair), first_of(row), firsts);
        seconds = add_product_flushed(second_of(pair), second_of(row), seconds);
      }
      std::memcpy(&total, at(sum)[i], sizeof total);
      total = flush(flush(total) + flush(firsts + seconds));
      std::memcpy(at(sum)[i], &total, sizeof total);
    }
  }

 private:
  static uint32_t (*at(int tile))[16] {
    if (!tile_file.configured) __builtin_trap();
    return tile_file.tile[tile];
  }
};

}  // namespace qkv::QKV_ISA
