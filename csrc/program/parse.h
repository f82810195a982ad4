// Reads the text of a score program: lines, of which each is a table or an instruction.
#pragma once

#include <string_view>

#include "export.h"
#include "program/builder.h"

namespace qkv::program {

// The types that operands may be of, a bit for each.
enum class Takes : uint8_t { reals = 1, integers = 2, numbers = 3, logicals = 6, all = 7 };
inline bool is_taken(Takes takes, Type type) { return int(takes) >> int(type) & 1; }

// An operation whose operands are of one type.
struct Operation {
  const char* name;
  Op op;
  int operands;
  Takes takes;

  bool compares() const { return op >= Op::eq && op <= Op::ge; }
};

// By its name in a text; null: there is none.
QKV_CORE_API const Operation* operation_named(std::string_view name);

struct Parsed {
  Builder builder;
  int result = -1;
  // How many elements the joined tables of reals, and of integers, have at least.
  int64_t reals = 0, integers = 0;
};

// Throws std::invalid_argument with the line that is wrong, and why.
Parsed parse(std::string_view text);

}  // namespace qkv::program
