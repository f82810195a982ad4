// The types that elements of tensors have, and how an element is read and written as double.
#pragma once

#include "attention.h"
#include "common/half.h"

namespace qkv::reference {

// The first four are those of DType, in its order.
enum class Type { f32, f64, bf16, f16, byte, int8, int32, int64 };

inline Type type_of(DType dtype) { return Type(int(dtype)); }
static_assert(int(Type::f16) == int(DType::f16) && int(Type::f64) == int(DType::f64));

inline Type type_of(MaskType mask) {
  switch (mask) {
    case MaskType::boolean:
      return Type::byte;
    case MaskType::f32:
      return Type::f32;
    case MaskType::bf16:
      return Type::bf16;
    case MaskType::f16:
      return Type::f16;
    default:
      return Type::f64;
  }
}

inline int64_t size_of(Type type) {
  switch (type) {
    case Type::byte:
    case Type::int8:
      return 1;
    case Type::bf16:
    case Type::f16:
      return 2;
    case Type::f32:
    case Type::int32:
      return 4;
    default:
      return 8;
  }
}

inline double read(Type type, const void* data, int64_t at) {
  switch (type) {
    case Type::f32:
      return static_cast<const float*>(data)[at];
    case Type::f64:
      return static_cast<const double*>(data)[at];
    case Type::bf16:
      return widen(static_cast<const BFloat16*>(data)[at]);
    case Type::f16:
      return widen(static_cast<const Float16*>(data)[at]);
    case Type::byte:
      return static_cast<const uint8_t*>(data)[at];
    case Type::int8:
      return static_cast<const int8_t*>(data)[at];
    case Type::int32:
      return static_cast<const int32_t*>(data)[at];
    case Type::int64:
      break;
  }
  return double(static_cast<const int64_t*>(data)[at]);
}

// A half is rounded twice, to f32 and then to its own type, since that is how the kernels round it.
inline void write(Type type, void* data, int64_t at, double x) {
  switch (type) {
    case Type::f32:
      static_cast<float*>(data)[at] = float(x);
      break;
    case Type::f64:
      static_cast<double*>(data)[at] = x;
      break;
    case Type::bf16:
      static_cast<BFloat16*>(data)[at] = narrow<BFloat16>(float(x));
      break;
    case Type::f16:
      static_cast<Float16*>(data)[at] = narrow<Float16>(float(x));
      break;
    case Type::byte:
      static_cast<uint8_t*>(data)[at] = uint8_t(x);
      break;
    case Type::int8:
      static_cast<int8_t*>(data)[at] = int8_t(x);
      break;
    case Type::int32:
      static_cast<int32_t*>(data)[at] = int32_t(x);
      break;
    case Type::int64:
      static_cast<int64_t*>(data)[at] = int64_t(x);
  }
}

}  // namespace qkv::reference
