// AMX's registers and instructions, on any CPU. As there, what is done to a register that is
// not configured ends the program.
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
  template <int sum, int a, int b>
  static void dot() {
    static_assert(sum != a && sum != b && a != b);
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 16; ++j) {
        float total = float_of_bits(at(sum)[i][j]);
        for (int k = 0; k < 16; ++k)
          total +=
              first(at(a)[i][k]) * first(at(b)[k][j]) + second(at(a)[i][k]) * second(at(b)[k][j]);
        at(sum)[i][j] = bits_of(total);
      }
  }

 private:
  static uint32_t (*at(int tile))[16] {
    if (!tile_file.configured) __builtin_trap();
    return tile_file.tile[tile];
  }
  static float first(uint32_t pair) { return float_of_bits(pair << 16); }
  static float second(uint32_t pair) { return float_of_bits(pair & 0xffff0000); }
};

}  // namespace qkv::QKV_ISA
