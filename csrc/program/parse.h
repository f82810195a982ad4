// Reads the text of a score program: lines, of which each is a table or an instruction.
#pragma once

#include <string_view>

#include "program/builder.h"

namespace qkv::program {

struct Parsed {
  Builder builder;
  int result = -1;
  // How many elements the joined tables of reals, and of integers, have at least.
  int64_t reals = 0, integers = 0;
};

// Throws std::invalid_argument with the line that is wrong, and why.
Parsed parse(std::string_view text);

}  // namespace qkv::program
