// The score programs of calls (csrc/score_program.h), read once for each text.
#pragma once

#include <memory>

#include "call/check.h"
#include "score_program.h"

namespace qkv {

// Of option score_program. Throws c10::ValueError for a text that is no program.
std::shared_ptr<const ScoreProgram> score_program_of(const Call& call);

// That score_tables and score_indices, which are [N] or [R, N], have what the program reads, and a
// row for all batch items or for each of R equal parts of them.
template <class T>
void check_score_program(const Call& call, const Sizes<T>& sizes);

}  // namespace qkv
