#include "call/scores.h"

#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

namespace qkv {
namespace {

// Programs are kept by their texts, up to so many. A program has a few KiB, and a model a handful.
constexpr size_t kMostPrograms = 1024;

std::shared_ptr<const ScoreProgram> program_of(const std::string& text) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const ScoreProgram>> programs;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = programs.find(text);
  if (found != programs.end()) return found->second;
  if (programs.size() >= kMostPrograms) programs.clear();
  return programs[text] = std::make_shared<ScoreProgram>(text);
}

template <class T>
void check_tables(const Call& call, Argument argument, int64_t elements, const T& items) {
  if (!call.has(argument)) {
    TORCH_CHECK_VALUE(elements == 0, call.title(), ": ", call.name_of(argument),
                      " is None, but score_program reads ", elements, " elements of it");
    return;
  }
  const int64_t dims = call[argument].dim();
  expect_shape<T>(dims == 1 || dims == 2, call, argument, ", but [N] or [R, N] is expected");
  expect_shape<T>(are_equal<T>(size_from_right<T>(call[argument], 0), T(elements)), call, argument,
                  ", but score_program reads ", elements, " elements of each row");
  if (dims == 1) return;
  const T rows = size_from_right<T>(call[argument], 1);
  expect_shape<T>(is_one(rows) || divides(rows, items), call, argument,
                  ", but one row is expected, or R for R equal parts of the ", items,
                  call.is_packed() ? " documents" : " batch items");
}

}  // namespace

std::shared_ptr<const ScoreProgram> score_program_of(const Call& call) {
  try {
    return program_of(call.options.score_program);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, call.title(), ": ", error.what());
  }
}

template <class T>
void check_score_program(const Call& call, const Sizes<T>& sizes) {
  if (call.options.score_program.empty()) {
    for (const Argument argument : {arg::score_tables, arg::score_indices})
      TORCH_CHECK_VALUE(!call.has(argument), call.title(), ": ", call.name_of(argument),
                        " is given, but there is no score_program");
    return;
  }
  const auto program = score_program_of(call);
  const T items = sizes.dropout_items();
  check_tables<T>(call, arg::score_tables, program->table_size(), items);
  check_tables<T>(call, arg::score_indices, program->index_size(), items);
  const auto rows = [&](Argument argument) {
    return call[argument].defined() ? size_from_right<T>(call[argument], 1) : T(1);
  };
  const T reals = rows(arg::score_tables), integers = rows(arg::score_indices);
  TORCH_CHECK_VALUE(is_one(reals) || is_one_or(integers, reals), call.title(),
                    ": score_tables has ", reals, " rows and score_indices ", integers,
                    ", but as many are expected, or one");
}

template void check_score_program(const Call&, const Sizes<int64_t>&);
template void check_score_program(const Call&, const Sizes<c10::SymInt>&);

}  // namespace qkv
