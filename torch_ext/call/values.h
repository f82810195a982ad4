// The types of options: how schemas write them, and how they become IValues, of which the
// dispatcher's stack is made, and come back.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string_view>

#include "call/options.h"

namespace qkv {

template <class T>
struct Value;

// What an IValue holds as it is.
template <class T>
struct OwnValue {
  static T from(const c10::IValue& value, const char*) { return value.to<T>(); }
  static c10::IValue to(const T& x) { return x; }
};

#define QKV_OWN_VALUE(T, type, default_value)                             \
  template <>                                                             \
  struct Value<T> : OwnValue<T> {                                         \
    static constexpr const char *kType = type, *kDefault = default_value; \
  };
QKV_OWN_VALUE(double, "float", "0.0")
QKV_OWN_VALUE(bool, "bool", "False")
QKV_OWN_VALUE(std::string, "str", "\"\"")
QKV_OWN_VALUE(std::optional<double>, "float?", "None")
QKV_OWN_VALUE(std::optional<bool>, "bool?", "None")
QKV_OWN_VALUE(c10::SymInt, "SymInt", "0")
#undef QKV_OWN_VALUE

template <>
struct Value<Window> {
  static constexpr const char *kType = "SymInt[2]?", *kDefault = "None";
  static Window from(const c10::IValue& value, const char* op) {
    if (value.isNone()) return {};
    const auto sizes = value.toSymIntVector();
    TORCH_CHECK_VALUE(sizes.size() == 2, op, ": window_size is ", c10::SymIntArrayRef(sizes),
                      ", but two numbers are expected: (left, right), -1 for an open side");
    return {sizes[0], sizes[1]};
  }
  static c10::IValue to(const Window& x) {
    if (x.left.maybe_as_int() == -1 && x.right.maybe_as_int() == -1) return {};
    return std::vector<c10::SymInt>{x.left, x.right};
  }
};

template <>
struct Value<ShardNumbers> {
  static constexpr const char *kType = "SymInt[7]?", *kDefault = "None";
  static ShardNumbers from(const c10::IValue& value, const char* op) {
    ShardNumbers shard;
    if (value.isNone()) return shard;
    const auto numbers = value.toSymIntVector();
    TORCH_CHECK_VALUE(numbers.size() == shard.all.size(), op, ": shard is ",
                      c10::SymIntArrayRef(numbers),
                      ", but seven numbers are expected: (query_offset, key_offset, seqlen_q, "
                      "seqlen_k, head_offset, heads, batch_offset)");
    std::copy(numbers.begin(), numbers.end(), shard.all.begin());
    return shard;
  }
  static c10::IValue to(const ShardNumbers& x) {
    if (x.is_whole()) return {};
    return std::vector<c10::SymInt>(x.all.begin(), x.all.end());
  }
};

// One of some words, each of which stands for the number of its place, or None, which stands for 0.
template <class E>
struct WordValue {
  static constexpr const char *kType = "str?", *kDefault = "None";
  static E from(const c10::IValue& value, const char* op) {
    return value.isNone() ? E(0) : called(value.toStringView(), op);
  }
  static E called(std::string_view word, const char* op) {
    const auto& words = Value<E>::kWords;
    for (size_t i = 0; i < std::size(words); ++i)
      if (word == words[i]) return E(i + 1);
    TORCH_CHECK_VALUE(false, op, ": ", Value<E>::kName, " is '", word, "', but None, ",
                      Value<E>::kExpected, " is expected");
  }
  static c10::IValue to(E x) {
    return x == E(0) ? c10::IValue() : c10::IValue(Value<E>::kWords[int(x) - 1]);
  }
};

template <>
struct Value<Reduce> : WordValue<Reduce> {
  static constexpr const char* kWords[] = {"heads", "queries"};
  static constexpr const char *kName = "reduce", *kExpected = "'heads' or 'queries'";
};

static_assert(int(ScoreWay::elements) == 1 && int(ScoreWay::fixed) == 4);
template <>
struct Value<ScoreWay> : WordValue<ScoreWay> {
  static constexpr const char* kWords[] = {"elements", "pairs", "tiles", "fixed"};
  static constexpr const char *kName = "scores",
                              *kExpected = "'elements', 'pairs', 'tiles' or 'fixed'";
};

}  // namespace qkv
