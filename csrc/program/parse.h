// Reads the text of a score program: lines, of which each is a table or an instruction.
#pragma once

#include <string_view>

#include "export.h"
#include "program/builder.h"

namespace qkv::program {

// An operation whose operands are of one type, and those that it takes.
enum class Takes : uint8_t { reals, integers, numbers, logicals, all };
struct Operation {
  const char* name;
  Op op;
  int operands;
  Takes takes;

  bool compares() const { return op >= Op::eq && op <= Op::ge; }
};

// By its name in a text; null: there is none.
QKV_CORE_API const Operation* operation_named(std::string_view name);
QKV_CORE_API bool is_taken(Takes takes, Type type);

struct Parsed {
  Builder builder;
  int result = -1;
  // How many elements the joined tables of reals, and of integers, have at least.
  int64_t reals = 0, integers = 0;
};

// Throws std::invalid_argument with the line that is wrong, and why.
Parsed parse(std::string_view text);

}  // namespace qkv::program
