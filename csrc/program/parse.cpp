#include "program/parse.h"

#include <locale.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace qkv::program {
namespace {

constexpr Operation kOperations[] = {
    {"add", Op::add, 2, Takes::numbers},
    {"sub", Op::sub, 2, Takes::numbers},
    {"mul", Op::mul, 2, Takes::numbers},
    {"min", Op::min, 2, Takes::numbers},
    {"max", Op::max, 2, Takes::numbers},
    {"floordiv", Op::floordiv, 2, Takes::numbers},
    {"rem", Op::rem, 2, Takes::numbers},
    {"neg", Op::neg, 1, Takes::numbers},
    {"abs", Op::abs, 1, Takes::numbers},
    {"div", Op::div, 2, Takes::reals},
    {"exp", Op::exp, 1, Takes::reals},
    {"log", Op::log, 1, Takes::reals},
    {"tanh", Op::tanh, 1, Takes::reals},
    {"sigmoid", Op::sigmoid, 1, Takes::reals},
    {"sqrt", Op::sqrt, 1, Takes::reals},
    {"rsqrt", Op::rsqrt, 1, Takes::reals},
    {"floor", Op::floor, 1, Takes::reals},
    {"sin", Op::sin, 1, Takes::reals},
    {"cos", Op::cos, 1, Takes::reals},
    {"eq", Op::eq, 2, Takes::all},
    {"ne", Op::ne, 2, Takes::all},
    {"lt", Op::lt, 2, Takes::numbers},
    {"le", Op::le, 2, Takes::numbers},
    {"gt", Op::gt, 2, Takes::numbers},
    {"ge", Op::ge, 2, Takes::numbers},
    {"and", Op::logical_and, 2, Takes::logicals},
    {"or", Op::logical_or, 2, Takes::logicals},
    {"xor", Op::logical_xor, 2, Takes::logicals},
    {"not", Op::logical_not, 1, Takes::logicals},
    {"shl", Op::shl, 2, Takes::integers},
    {"shr", Op::shr, 2, Takes::integers},
};
constexpr std::pair<const char*, Op> kInputs[] = {{"score", Op::score},
                                                  {"batch", Op::batch},
                                                  {"head", Op::head},
                                                  {"query", Op::query},
                                                  {"key", Op::key}};

struct Table {
  Type type;
  int64_t offset;
  std::vector<int64_t> sizes;
};

// The largest table and the most instructions: places are integers of 32 bits with kOutside below
// all of them, and the work of a call grows with its program.
constexpr int64_t kMostElements = -int64_t(kOutside) - 1;
constexpr size_t kMostInstructions = 4096;

class Parser {
 public:
  void line(const std::string& text) {
    words_.clear();
    std::istringstream stream(text);
    for (std::string word; stream >> word;) words_.push_back(word);
    if (words_.empty()) return;
    if (words_[0][0] == '@') return table();
    if (numbers_.size() == kMostInstructions) fail("a program has at most 4096 instructions");
    numbers_.push_back(instruction());
  }

  Parsed finish() {
    if (numbers_.empty()) fail("a program has an instruction at least");
    parsed_.result = numbers_.back();
    if (b()[parsed_.result].type != Type::real)
      fail("the last instruction must give a real number");
    refuse_outside();
    return std::move(parsed_);
  }

 private:
  [[noreturn]] static void fail(const std::string& why) { throw std::invalid_argument(why); }
  Builder& b() { return parsed_.builder; }

  // The words after the first.
  void expect(size_t count) const {
    if (words_.size() != count + 1)
      fail("'" + words_[0] + "' takes " + std::to_string(count) + " operands, not " +
           std::to_string(words_.size() - 1));
  }
  int64_t integer(size_t word) const {
    const std::string& from = words_.at(word);
    int64_t x = 0;
    const auto [end, error] = std::from_chars(from.data(), from.data() + from.size(), x);
    if (error != std::errc() || end != from.data() + from.size())
      fail("'" + from + "' is no integer");
    return x;
  }
  int64_t integer32(size_t word) const {
    const int64_t x = integer(word);
    if (x != int32_t(x)) fail("'" + words_[word] + "' is no integer of 32 bits");
    return x;
  }
  double real(size_t word) const {
    // The caller's own locale may have a comma for the point.
    static const locale_t plain = newlocale(LC_ALL_MASK, "C", nullptr);
    const std::string& from = words_.at(word);
    char* end = nullptr;
    errno = 0;
    const double x = strtod_l(from.c_str(), &end, plain);
    const bool overflows = errno == ERANGE && std::isinf(x);
    if (*end || overflows) fail("'" + from + "' is no number");
    return x;
  }
  // The instruction whose result an operand is.
  int operand(size_t word) {
    const int64_t n = integer(word);
    if (n < 0 || n >= int64_t(numbers_.size()))
      fail("operand " + std::to_string(n) +
           " is no instruction before this one, of which there are " +
           std::to_string(numbers_.size()));
    return numbers_[size_t(n)];
  }

  void table() {
    if (!numbers_.empty()) fail("tables come before all instructions");
    const bool is_real = words_[0] == "@float";
    if (!is_real && words_[0] != "@int") fail("a table is of @float or @int, not " + words_[0]);
    if (words_.size() < 2) fail("a table begins with an element of the joined ones");
    Table of{is_real ? Type::real : Type::integer, integer(1), {}};
    int64_t elements = 1;
    for (size_t n = 2; n < words_.size(); ++n) {
      of.sizes.push_back(integer(n));
      if (of.sizes.back() < 0) fail("a size is 0 or more, not " + words_[n]);
      if (of.sizes.back() && elements > kMostElements / of.sizes.back())
        fail("a table has fewer than 2^30 elements");
      elements *= of.sizes.back();
    }
    if (of.offset < 0 || of.offset > kMostElements) fail("a table begins with element 0 to 2^30");
    int64_t& all = is_real ? parsed_.reals : parsed_.integers;
    all = std::max(all, of.offset + elements);
    tables_.push_back(std::move(of));
  }

  int instruction() {
    const std::string& name = words_[0];
    for (const auto& [word, op] : kInputs)
      if (name == word)
        return expect(0), b().input(op, op == Op::score ? Type::real : Type::integer);
    if (const Operation* of = operation_named(name)) return operation(*of);
    if (name == "float") return expect(1), b().real(real(1));
    if (name == "int") return expect(1), b().integer(integer32(1));
    if (name == "bool") {
      expect(1);
      return b().add({.op = Op::constant, .type = Type::boolean, .integer = integer(1) ? -1 : 0});
    }
    if (name == "where") return choice();
    if (name == "to_float" || name == "to_int") return conversion(name == "to_float");
    if (name == "load") return element();
    fail("there is no instruction '" + name + "'");
  }

  int operation(const Operation& of) {
    expect(size_t(of.operands));
    const int x = operand(1), y = of.operands == 2 ? operand(2) : -1;
    const Type type = b()[x].type;
    if (!is_taken(of.takes, type) || (y >= 0 && b()[y].type != type))
      fail("'" + words_[0] + "' does not take operands of these types");
    return of.compares() ? b().compare(of.op, x, y) : b().make(of.op, x, y);
  }

  int choice() {
    expect(3);
    const int which = operand(1), x = operand(2), y = operand(3);
    if (b()[which].type != Type::boolean || b()[x].type != b()[y].type)
      fail("'where' takes a boolean and two of one type");
    return b().make(Op::where, which, x, y);
  }

  int conversion(bool to_real) {
    expect(1);
    const int x = operand(1);
    const Type from = b()[x].type, to = to_real ? Type::real : Type::integer;
    if (from == to) fail("'" + words_[0] + "' does not take what it gives");
    return b().add({.op = to_real ? Op::to_real : Op::to_integer, .type = to, .a = x});
  }

  int element() {
    if (words_.size() < 2) fail("'load' takes a table");
    const int64_t n = integer(1);
    if (n < 0 || n >= int64_t(tables_.size())) fail("there is no table " + words_[1]);
    const Table& of = tables_[size_t(n)];
    expect(1 + of.sizes.size());
    std::vector<int> indices;
    for (size_t d = 0; d < of.sizes.size(); ++d) {
      indices.push_back(operand(2 + d));
      if (b()[indices.back()].type != Type::integer) fail("an index is an integer");
    }
    const int loaded = b().load(of.type, of.offset, of.sizes, indices);
    if (of.type == Type::integer) loaded_.push_back(loaded);
    return loaded;
  }

  // A score that an integer outside of its table has to do with is NaN, unless it is -inf: such an
  // integer has no other way to say that it is none.
  void refuse_outside() {
    std::optional<int> outside;
    for (int load : loaded_) {
      const int place = b()[load].a;
      if (b()[place].op == Op::constant) continue;
      const int is = b().compare(Op::lt, place, b().integer(0));
      outside = outside ? b().make(Op::logical_or, *outside, is) : is;
    }
    if (!outside) return;
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    const int shown = b().compare(Op::ne, parsed_.result, b().real(-kInfinite));
    parsed_.result = b().make(Op::where, b().make(Op::logical_and, *outside, shown), b().real(kNaN),
                              parsed_.result);
  }

  Parsed parsed_;
  std::vector<Table> tables_;
  std::vector<int> numbers_;  // what each instruction of the text has become
  std::vector<int> loaded_;   // integers that come from tables
  std::vector<std::string> words_;
};

}  // namespace

const Operation* operation_named(std::string_view name) {
  const auto found = std::find_if(std::begin(kOperations), std::end(kOperations),
                                  [&](const Operation& of) { return name == of.name; });
  return found == std::end(kOperations) ? nullptr : found;
}

Parsed parse(std::string_view text) {
  Parser parser;
  std::istringstream stream{std::string(text)};
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    try {
      parser.line(line);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("score program, line " + std::to_string(number) + " ('" + line +
                                  "'): " + error.what());
    }
  }
  try {
    return parser.finish();
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string("score program: ") + error.what());
  }
}

}  // namespace qkv::program
