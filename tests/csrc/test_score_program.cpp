// Score programs (score_program.h), on every instruction set. What an option of problem.h does, a
// program does as well, and is held against the same f64 reference in every pass; each instruction
// is held against the standard library, and its derivatives against finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "cases.h"
#include "double_workload.h"
#include "score_program.h"

namespace qkv::test {
namespace {

class ScoreProgramTest : public IsaTest {};

QKV_FOR_EACH_ISA(ScoreProgramTest);

std::string text_of(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "float %.17g\n", x);
  return text;
}

// A table of the compute type of a case, and a direction and a gradient of it.
struct Tables {
  Tables(const Case& c, std::vector<double> numbers) : dtype(compute_type(c.dtype)) {
    set(values, numbers);
    set(grad, std::vector<double>(numbers.size()));
  }
  void set(std::vector<char>& to, const std::vector<double>& numbers) {
    to.resize(numbers.size() * size_t(size_of(dtype)));
    for (size_t n = 0; n < numbers.size(); ++n)
      reference::write(type_of(dtype), to.data(), int64_t(n), numbers[n]);
  }
  double grad_at(int64_t n) const { return reference::read(type_of(dtype), grad.data(), n); }

  DType dtype;
  std::vector<char> values, direction, grad;
};

// All passes of a case, with a program in place of what `option` sets. `grad_of` gets the gradient
// of the tables.
struct Passes {
  Results first, second;
  JvpResults jvp;
  std::vector<double> grad_tables, second_tables;
};

using Change = std::function<void(Problem&)>;

// Runs the passes of the library on w with `change` applied to the problem.
Passes run_with(const JvpWorkload& w, const Change& change, Tables* tables, bool is_reference) {
  const Library& library = is_reference ? kReference : kKernels;
  const Jvp jvp = is_reference ? reference::attention_jvp : attention_jvp;
  const auto problem = [&] {
    Problem p = w.problem();
    change(p);
    return p;
  };
  JvpArgs along = w.args();
  if (tables && !tables->direction.empty()) along.tables = tables->direction.data();
  const auto run = [&](bool twice, std::vector<double>& grad_tables) {
    Outputs outputs(w);
    const Tensor output_jvp = w.make_output(type_of(w.c.dtype), w.c.heads(), w.c.L, w.c.Dv);
    const Tensor lse_jvp = w.make_output(w.compute_element(), w.c.heads(), w.c.L, 1);
    library.forward(problem(), outputs.forward_result(true));
    if (twice) jvp(problem(), along, {{}, {}, output_jvp.output(), lse_jvp.output()});
    outputs.forward_is_done();
    const BackwardDirection direction{along, output_jvp.input(), lse_jvp.input()};
    BackwardArgs args = outputs.backward_args();
    if (twice) args.direction = &direction;
    if (tables) args.grad_tables = tables->grad.data();
    library.backward(problem(), args);
    const int64_t elements = tables ? int64_t(tables->grad.size()) / size_of(tables->dtype) : 0;
    for (int64_t n = 0; n < elements; ++n) grad_tables.push_back(tables->grad_at(n));
    return outputs.values();
  };
  Passes all;
  all.first = run(false, all.grad_tables);
  all.second = run(true, all.second_tables);
  const Tensor output_jvp = w.make_output(type_of(w.c.dtype), w.c.heads(), w.c.L, w.c.Dv);
  const Tensor lse_jvp = w.make_output(w.compute_element(), w.c.heads(), w.c.L, 1);
  jvp(problem(), along, {{}, {}, output_jvp.output(), lse_jvp.output()});
  all.jvp = {{}, {}, output_jvp.values(), lse_jvp.values()};
  return all;
}

// Each by its own size: at most `most` of the largest number, and `slack`.
void expect_alike(const char* name, const std::vector<double>& a, const std::vector<double>& b,
                  double most, double slack = 0) {
  ASSERT_EQ(a.size(), b.size()) << name;
  double size = 1e-30, error = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    ASSERT_EQ(std::isfinite(a[n]), std::isfinite(b[n])) << name << " " << n;
    if (std::isfinite(b[n])) size = std::max(size, std::abs(b[n]));
    if (std::isfinite(b[n])) error = std::max(error, std::abs(a[n] - b[n]));
  }
  EXPECT_LE(error, most * size + slack) << name;
}

double most_of(const Case& c) {
  switch (c.dtype) {
    case DType::f64:
      return 1e-10;
    case DType::f32:
      return 2e-4;
    default:
      return 0.06;
  }
}

void expect_alike(const Passes& actual, const Passes& expected, const Case& c) {
  const double most = most_of(c);
  const auto each = [&](const char* order, const Results& a, const Results& e) {
    SCOPED_TRACE(order);
    expect_alike("grad_query", a.grad_query, e.grad_query, most);
    expect_alike("grad_key", a.grad_key, e.grad_key, most);
    expect_alike("grad_value", a.grad_value, e.grad_value, most);
  };
  expect_alike("output", actual.first.output, expected.first.output, most);
  expect_alike("lse", actual.first.lse, expected.first.lse, most);
  each("first", actual.first, expected.first);
  each("second", actual.second, expected.second);
  expect_alike("output_jvp", actual.jvp.output_jvp, expected.jvp.output_jvp, most);
  expect_alike("lse_jvp", actual.jvp.lse_jvp, expected.jvp.lse_jvp, most);
}

std::vector<Case> program_cases() {
  std::vector<Case> all;
  for (DType dtype : kDTypes)
    for (const auto& [L, S] : {std::pair<int64_t, int64_t>{70, 90}, {3, 600}, {150, 20}}) {
      Case c;
      c.dtype = dtype, c.batch = {2}, c.kv_heads = 2, c.group = L == 70 ? 3 : 1;
      c.L = L, c.S = S, c.D = 16, c.Dv = 9, c.num_threads = 2;
      all.push_back(c);
      c.is_causal = true, c.dropout_p = 0.2, c.sinks = true;
      all.push_back(c);
    }
  return all;
}

TEST_P(ScoreProgramTest, SoftcapIsTheOption) {
  const ScoreProgram program("score\n" + text_of(1 / 2.5) + "mul 0 1\ntanh 2\n" + text_of(2.5) +
                             "mul 3 4\n");
  const ScoreFunction function{&program};
  int number = 0;
  for (const Case& c : program_cases()) {
    if (!takes(number++, 5)) continue;
    SCOPED_TRACE(::testing::Message() << c);
    const JvpWorkload w(c);
    const Passes expected =
        run_with(w.in_f64(), [](Problem& p) { p.softcap = 2.5; }, nullptr, true);
    const Passes actual = run_with(w, [&](Problem& p) { p.function = &function; }, nullptr, false);
    expect_alike(actual, expected, c);
    if (HasFailure()) return;
  }
}

// score - slopes[head] * |query + S - L - key|: the gradient of the slopes is that of a table, and
// their direction one, too.
TEST_P(ScoreProgramTest, SlopesAreTheOption) {
  int number = 0;
  for (Case c : program_cases()) {
    if (!takes(number++, 5)) continue;
    c.alibi_slopes = c.grad_alibi_slopes = true;
    SCOPED_TRACE(::testing::Message() << c);
    const JvpWorkload w(c);
    const int64_t H = c.heads();
    const ScoreProgram program(
        "@float 0 " + std::to_string(2 * H) + "\nscore\nbatch\nint " + std::to_string(H) +
        "\nmul 1 2\nhead\nadd 3 4\nload 0 5\nquery\nkey\nsub 7 8\nint " +
        std::to_string(c.S - c.L) + "\nadd 9 10\nabs 11\nto_float 12\nmul 6 13\nsub 0 14\n");
    Tables tables(c, w.alibi_slopes.values());
    tables.set(tables.direction, w.slopes_jvp.values());
    const ScoreFunction function{&program, tables.values.data()};
    const Passes expected = run_with(w.in_f64(), [](Problem&) {}, nullptr, true);
    const Passes actual = run_with(
        w,
        [&](Problem& p) {
          p.by_head[kAlibiSlopes] = {};
          p.function = &function;
        },
        &tables, false);
    expect_alike(actual, expected, c);
    // Distances magnify what rounding has left in each row's sum. That is the same in both, unless
    // an element of the output's direction, of up to 2, is rounded to neighbours, as NEON does
    // once.
    const double step = c.dtype == DType::bf16 ? 0x1p-7 : c.dtype == DType::f16 ? 0x1p-10 : 0;
    const Passes option = run_with(w, [](Problem&) {}, nullptr, false);
    expect_alike("grad of tables", actual.grad_tables, option.first.grad_alibi_slopes,
                 10 * most_of(c));
    expect_alike("second of tables", actual.second_tables, option.second.grad_alibi_slopes,
                 10 * most_of(c), step * c.S);
    if (HasFailure()) return;
  }
}

// score + table[...] by the head, the query and the key, registers 1, 2 and 3: the sizes of the
// table and which element it is. What grows evenly from key to key is read where it is, so far as
// it does.
struct Look {
  std::function<std::vector<int64_t>(const Case&)> sizes;
  std::function<std::string(const Case&)> text;  // its indices, from register 4 on
  std::function<int64_t(const Case&, int64_t h, int64_t i, int64_t j)> place;
};
std::string number(int64_t x) { return "int " + std::to_string(x) + "\n"; }
const Look kLooks[] = {
    {[](const Case& c) { return std::vector<int64_t>{c.heads(), c.L, c.S}; },
     [](const Case&) { return "load 0 1 2 3\nadd 0 4\n"; },
     [](const Case& c, auto h, auto i, auto j) { return (h * c.L + i) * c.S + j; }},
    // A distance.
    {[](const Case& c) { return std::vector<int64_t>{c.heads(), c.L + c.S}; },
     [](const Case& c) { return "sub 2 3\n" + number(c.S) + "add 4 5\nload 0 1 6\nadd 0 7\n"; },
     [](const Case& c, auto h, auto i, auto j) { return h * (c.L + c.S) + i - j + c.S; }},
    // One that is negative for later keys, and counts from the end.
    {[](const Case& c) { return std::vector<int64_t>{c.L + c.S}; },
     [](const Case&) { return "sub 2 3\nload 0 4\nadd 0 5\n"; },
     [](const Case& c, auto, auto i, auto j) { return i - j + (i < j ? c.L + c.S : 0); }},
    // Every other element, of neighbouring heads.
    {[](const Case& c) { return std::vector<int64_t>{c.L + 2 * c.S, c.heads()}; },
     [](const Case& c) {
       return "int 2\nmul 3 4\nsub 5 2\n" + number(c.L) + "add 6 7\nload 0 8 1\nadd 0 9\n";
     },
     [](const Case& c, auto h, auto i, auto j) { return (2 * j - i + c.L) * c.heads() + h; }},
    // Two indices by the key, of which neither tells of the other.
    {[](const Case& c) { return std::vector<int64_t>{c.L + c.S, c.L + c.S}; },
     [](const Case&) { return "sub 2 3\nadd 2 3\nload 0 4 5\nadd 0 6\n"; },
     [](const Case& c, auto, auto i, auto j) {
       return (i - j + (i < j ? c.L + c.S : 0)) * (c.L + c.S) + i + j;
     }},
};

// Their gradient is that of a mask, summed over the pairs that look at an element; and the same
// bits for any number of threads.
TEST_P(ScoreProgramTest, TablesAreMasks) {
  int number = 0;
  for (const Look& look : kLooks)
    for (Case c : program_cases()) {
      if (!takes(number++, 5)) continue;
      if (&look != kLooks && c.dtype != DType::f32 && c.dtype != DType::f64) continue;
      c.mask_type = c.dtype == DType::f64 ? MaskType::f64 : MaskType::f32;
      c.share_batch = true, c.grad_mask = true;
      c.mask_strides = {0, c.L * c.S, c.S, 1};
      SCOPED_TRACE(::testing::Message() << c << " " << &look - kLooks);
      JvpWorkload w(c, kAlongAll & ~kAlongMask);
      std::string sizes;
      int64_t elements = 1;
      for (int64_t size : look.sizes(c)) sizes += " " + std::to_string(size), elements *= size;
      const ScoreProgram program("@float 0" + sizes + "\nscore\nhead\nquery\nkey\n" + look.text(c));
      std::vector<double> numbers;
      for (int64_t n = 0; n < elements; ++n) numbers.push_back(double(n * 37 % 64) / 32 - 1);
      const auto for_each_pair = [&](const auto& each) {
        for (int64_t h = 0; h < c.heads(); ++h)
          for (int64_t i = 0; i < c.L; ++i)
            for (int64_t j = 0; j < c.S; ++j)
              each((h * c.L + i) * c.S + j, size_t(look.place(c, h, i, j)));
      };
      for_each_pair([&](int64_t pair, size_t place) { w.mask.set(pair, numbers[place]); });
      Tables tables(c, numbers);
      const ScoreFunction function{&program, tables.values.data()};
      const Passes expected = run_with(w.in_f64(), [](Problem&) {}, nullptr, true);
      const auto change = [&](Problem& p) {
        p.masks[0] = {};
        p.function = &function;
      };
      const Passes actual = run_with(w, change, &tables, false);
      expect_alike(actual, expected, c);
      const Passes alone =
          run_with(w, [&](Problem& p) { change(p), p.num_threads = 1; }, &tables, false);
      EXPECT_EQ(alone.grad_tables, actual.grad_tables);
      EXPECT_EQ(alone.first.grad_key, actual.first.grad_key);
      // The reference adds to what is there before.
      const Results before = Outputs(w.in_f64()).values();
      std::vector<double> of_tables(numbers.size());
      for_each_pair([&](int64_t pair, size_t place) {
        of_tables[place] += expected.first.grad_mask[size_t(pair)] - before.grad_mask[size_t(pair)];
      });
      expect_alike("grad of tables", actual.grad_tables, of_tables, most_of(c));
      if (HasFailure()) return;
    }
}

// A table so large that planes have a sum together, to which the cells of one add after those of
// another.
TEST_P(ScoreProgramTest, PlanesThatShareASumOfTables) {
  Case c;
  c.dtype = DType::f32, c.kv_heads = 6, c.L = c.S = 800, c.D = c.Dv = 8;
  const Workload w(c);
  const ScoreProgram program(
      "@float 0 61\n@float 0 4194304\nscore\nquery\nkey\nadd 1 2\nint 61\nrem 3 4\n"
      "load 0 5\nint 0\nload 1 7\nadd 6 8\nadd 0 9\n");
  Tables tables(c, std::vector<double>(size_t(program.table_size())));
  const ScoreFunction function{&program, tables.values.data()};
  const auto run = [&](int threads) {
    Outputs outputs(w);
    Problem p = w.problem();
    p.function = &function, p.num_threads = threads;
    attention_forward(p, outputs.forward_result(true));
    outputs.forward_is_done();
    BackwardArgs args = outputs.backward_args();
    args.grad_tables = tables.grad.data();
    attention_backward(p, args);
    return std::vector<char>(tables.grad.begin(), tables.grad.begin() + 61 * 4);
  };
  const std::vector<char> alone = run(1);
  for (int n = 0; n < 5; ++n) EXPECT_EQ(run(4), alone);
}

// sin(score + table[...]) * table[head] * exp(300 * (key - query)): of most pairs that is_causal
// hides the last factor is infinite, which adds nothing to the gradient of the table.
ScoreProgram program_of_sines(const Case& c, const Look& look) {
  std::string sizes;
  for (int64_t size : look.sizes(c)) sizes += " " + std::to_string(size);
  std::string text = look.text(c);
  auto n = int(std::count(text.begin(), text.end(), '\n')) + 3;
  const auto add = [&](const std::string& line) { text += line + "\n", ++n; };
  const auto last = [&](int back) { return " " + std::to_string(n - back); };
  add("sin" + last(0));
  add("load 1 1");
  add("mul" + last(1) + last(0));
  const int product = n;
  add("sub 3 2");
  add("to_float" + last(0));
  add("float 300");
  add("mul" + last(1) + last(0));
  add("exp" + last(0));
  if (c.is_causal) add("mul " + std::to_string(product) + last(0));
  if (!c.is_causal) add("add " + std::to_string(product) + " 0");
  return ScoreProgram("@float 0" + sizes + "\n@float 0 " + std::to_string(c.heads()) +
                      "\nscore\nhead\nquery\nkey\n" + text);
}

TEST_P(ScoreProgramTest, TheSameBitsAsGenericCode) {
  set_reproducible(true);
  int number = 0;
  for (const Look& look : kLooks)
    for (const Case& c : program_cases()) {
      if (!takes(number++, 18)) continue;
      SCOPED_TRACE(::testing::Message() << c << " " << &look - kLooks);
      const JvpWorkload w(c);
      const ScoreProgram program = program_of_sines(c, look);
      std::vector<double> numbers;
      for (int64_t n = 0; n < program.table_size(); ++n) numbers.push_back(double(n * 37 % 64) / 9);
      Tables tables(c, numbers);
      tables.set(tables.direction, numbers);
      const ScoreFunction function{&program, tables.values.data()};
      const auto run = [&](const char* isa, int threads) {
        set_isa(isa);
        return run_with(
            w, [&](Problem& p) { p.function = &function, p.num_threads = threads; }, &tables,
            false);
      };
      const Passes expected = run("generic", 1);
      for (int threads : {1, 3, 7}) {
        const Passes actual = run(GetParam(), threads);
        expect_identical(actual.first, expected.first);
        expect_identical(actual.second, expected.second);
        expect_same_bits(actual.jvp, expected.jvp);
        EXPECT_EQ(actual.grad_tables, expected.grad_tables);
        EXPECT_EQ(actual.second_tables, expected.second_tables);
        for (double x : actual.grad_tables) EXPECT_TRUE(std::isfinite(x));
        for (double x : actual.second_tables) EXPECT_TRUE(std::isfinite(x));
      }
      if (HasFailure()) break;
    }
  set_reproducible(false);
}

// where(query > key, score, -inf) hides as a boolean mask does; the first query sees nothing.
TEST_P(ScoreProgramTest, MinusInfinityHides) {
  const ScoreProgram program("score\nquery\nkey\ngt 1 2\nfloat -inf\nwhere 3 0 4\n");
  const ScoreFunction function{&program};
  for (DType dtype : kDTypes) {
    Case c;
    c.dtype = dtype, c.L = 40, c.S = 70;
    c.mask_type = MaskType::boolean, c.mask_strides = {0, c.S, 1};
    SCOPED_TRACE(::testing::Message() << c);
    JvpWorkload w(c);
    for (int64_t i = 0; i < c.L; ++i)
      for (int64_t j = 0; j < c.S; ++j) w.mask.set({0, i, j}, i > j);
    const Passes expected = run_with(w.in_f64(), [](Problem&) {}, nullptr, true);
    const auto change = [&](Problem& p) { p.masks[0] = {}, p.function = &function; };
    expect_alike(run_with(w, change, nullptr, false), expected, c);
  }
}

// With one key, the log-sum-exp of a query is its score: f(x) for scores of x.
struct OneKey {
  explicit OneKey(std::vector<double> scores) : x(std::move(scores)) {
    const auto n = int64_t(x.size());
    p.dtype = DType::f64;
    p.seqlen_q = n, p.seqlen_k = 1, p.head_dim = p.head_dim_v = 1;
    p.query = {x.data(), strides}, p.key = {&one, {}}, p.value = {&one, {}};
  }
  std::vector<double> run(const ScoreProgram& program) {
    std::vector<double> output(x.size()), lse(x.size());
    function.program = &program;
    p.function = &function;
    attention_forward(p, {{output.data(), strides}, {lse.data(), strides}});
    return lse;
  }
  // f' and f'': the gradients of queries if that of every lse is 1, and their changes along ones.
  std::vector<double> grad(const ScoreProgram& program, bool twice) {
    const std::vector<double> lse = run(program), ones(x.size(), 1), zeros(x.size(), 0);
    std::vector<double> output(x.size(), 1), lse_jvp(x.size()), output_jvp(x.size()),
        found(x.size());
    BackwardArgs args;
    args.output = {output.data(), strides}, args.lse = {lse.data(), strides};
    args.grad_lse = {ones.data(), strides};
    args.grad_query = {found.data(), strides};
    BackwardDirection direction;
    direction.along.query = {ones.data(), strides};
    direction.output_jvp = {output_jvp.data(), strides};
    direction.lse_jvp = {lse_jvp.data(), strides};
    if (twice) {
      attention_jvp(p, direction.along,
                    {{}, {}, {output_jvp.data(), strides}, {lse_jvp.data(), strides}});
      args.direction = &direction;
    }
    attention_backward(p, args);
    return found;
  }
  std::vector<double> x;
  double one = 1;
  Strides strides{{}, 0, 1, 1};
  ScoreFunction function;
  Problem p;
};

struct OfReals {
  const char* text;
  std::function<double(double)> f;
};
const OfReals kOfReals[] = {
    {"neg 0", [](double x) { return -x; }},
    {"abs 0", [](double x) { return std::abs(x); }},
    {"exp 0", [](double x) { return std::exp(x); }},
    {"tanh 0", [](double x) { return std::tanh(x); }},
    {"sigmoid 0", [](double x) { return 1 / (1 + std::exp(-x)); }},
    {"sin 0", [](double x) { return std::sin(x); }},
    {"cos 0", [](double x) { return std::cos(x); }},
    {"floor 0", [](double x) { return std::floor(x); }},
    {"mul 0 0\nadd 0 1", [](double x) { return x + x * x; }},
    {"float 0.7\nsub 0 1\nmul 2 2", [](double x) { return (x - .7) * (x - .7); }},
    {"float 9\nadd 0 1\nlog 2", [](double x) { return std::log(x + 9); }},
    {"float 9\nadd 0 1\nsqrt 2", [](double x) { return std::sqrt(x + 9); }},
    {"float 9\nadd 0 1\nrsqrt 2", [](double x) { return 1 / std::sqrt(x + 9); }},
    {"float 9\nadd 0 1\ndiv 0 2", [](double x) { return x / (x + 9); }},
    {"float 0.31\nmin 0 1\nmul 2 0", [](double x) { return std::min(x, .31) * x; }},
    {"float 0.31\nmax 0 1\nmul 2 0", [](double x) { return std::max(x, .31) * x; }},
    {"float 1.3\nrem 0 1\nmul 2 0", [](double x) { return (x - std::floor(x / 1.3) * 1.3) * x; }},
    {"float 1.3\nfloordiv 0 1\nmul 2 0", [](double x) { return std::floor(x / 1.3) * x; }},
    {"float -1.3\nrem 0 1\nmul 2 0", [](double x) { return (x + std::floor(x / -1.3) * 1.3) * x; }},
    {"abs 0\nfloat inf\nrem 1 2\nmul 3 0", [](double x) { return std::abs(x) * x; }},
    {"float inf\nfloordiv 0 1\nmul 2 0", [](double x) { return x < 0 ? -x : 0; }},
    {"float 0.31\ngt 0 1\nmul 0 0\nwhere 2 3 0", [](double x) { return x > .31 ? x * x : x; }},
    {"to_int 0\nto_float 1\nmul 2 0", [](double x) { return std::trunc(x) * x; }},
};

TEST_P(ScoreProgramTest, InstructionsOfReals) {
  std::vector<double> x;
  for (int n = 0; n < 71; ++n) x.push_back(0.113 * n - 4.03);
  for (const OfReals& of : kOfReals) {
    SCOPED_TRACE(of.text);
    const ScoreProgram program(std::string("score\n") + of.text + "\n");
    OneKey problem(x);
    const std::vector<double> y = problem.run(program), first = problem.grad(program, false),
                              second = problem.grad(program, true);
    for (size_t n = 0; n < x.size(); ++n) {
      const double h = 1e-4, size = 1 + std::abs(of.f(x[n]));
      const double ahead = of.f(x[n] + h), behind = of.f(x[n] - h);
      EXPECT_NEAR(y[n], of.f(x[n]), 1e-12 * size) << x[n];
      EXPECT_NEAR(first[n], (ahead - behind) / (2 * h), 1e-5 * size) << x[n];
      EXPECT_NEAR(second[n], (ahead - 2 * of.f(x[n]) + behind) / (h * h), 1e-3 * size) << x[n];
    }
  }
}

struct OfIntegers {
  const char* text;  // of registers 0, the query's number, and 1, the constant
  int constant;
  std::function<int64_t(int64_t, int64_t)> f;
};
int64_t floor_of(int64_t q, int64_t c) { return int64_t(std::floor(double(q) / double(c))); }
const OfIntegers kOfIntegers[] = {
    {"add 0 1", 7, [](auto q, auto c) { return q + c; }},
    {"sub 0 1", 70, [](auto q, auto c) { return q - c; }},
    {"mul 0 1", -3, [](auto q, auto c) { return q * c; }},
    {"mul 0 1", 1 << 30,
     [](auto q, auto c) { return int64_t(int32_t(uint32_t(q) * uint32_t(c))); }},
    {"min 0 1", 7, [](auto q, auto c) { return std::min(q, c); }},
    {"max 0 1", 7, [](auto q, auto c) { return std::max(q, c); }},
    {"floordiv 0 1", 7, floor_of},
    {"floordiv 0 1", -7, floor_of},
    {"floordiv 0 1", 0, [](auto, auto) { return int64_t(0); }},
    {"int -1\nfloordiv 1 2", INT32_MIN, [](auto, auto c) { return c; }},
    {"rem 0 1", 7, [](auto q, auto c) { return q - floor_of(q, c) * c; }},
    {"floordiv 0 1", 8, floor_of},
    {"sub 0 1\nint 8\nfloordiv 2 3", 30, [](auto q, auto c) { return floor_of(q - c, 8); }},
    {"sub 0 1\nint 8\nrem 2 3", 30, [](auto q, auto c) { return (q - c) & 7; }},
    {"rem 0 1", -7, [](auto q, auto c) { return q - floor_of(q, c) * c; }},
    {"neg 0", 0, [](auto q, auto) { return -q; }},
    {"sub 0 1\nabs 2", 9, [](auto q, auto c) { return std::abs(q - c); }},
    {"and 0 1", 13, [](auto q, auto c) { return q & c; }},
    {"or 0 1", 13, [](auto q, auto c) { return q | c; }},
    {"xor 0 1", 13, [](auto q, auto c) { return q ^ c; }},
    {"not 0", 0, [](auto q, auto) { return ~q; }},
    {"shl 0 1", 3, [](auto q, auto c) { return q << c; }},
    {"shr 0 1", 2, [](auto q, auto c) { return q >> c; }},
    {"sub 0 1\nshl 1 2", 20,
     [](auto q, auto c) { return q < c || q >= c + 32 ? 0 : int64_t(int32_t(c << (q - c))); }},
    {"sub 0 1\nneg 1\nshr 3 2", 20,
     [](auto q, auto c) { return q < c || q >= c + 32 ? -1 : -c >> (q - c); }},
    {"eq 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q == c); }},
    {"ne 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q != c); }},
    {"lt 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q < c); }},
    {"le 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q <= c); }},
    {"gt 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q > c); }},
    {"ge 0 1\nto_int 2", 9, [](auto q, auto c) { return int64_t(q >= c); }},
    {"ge 0 1\nlt 0 1\nxor 2 3\nnot 4\nwhere 5 0 1", 9, [](auto, auto c) { return c; }},
};

TEST_P(ScoreProgramTest, InstructionsOfIntegers) {
  for (const OfIntegers& of : kOfIntegers) {
    SCOPED_TRACE(::testing::Message() << of.text << ", " << of.constant);
    std::string text = "query\nint " + std::to_string(of.constant) + "\n" + of.text + "\n";
    text += "to_float " + std::to_string(std::count(text.begin(), text.end(), '\n') - 1) + "\n";
    const std::vector<double> y = OneKey(std::vector<double>(71)).run(ScoreProgram(text));
    for (size_t n = 0; n < y.size(); ++n) {
      // The log-sum-exp is rounded to bits of its own.
      const double expected = double(of.f(int64_t(n), of.constant));
      EXPECT_NEAR(y[n], expected, 1e-14 * std::abs(expected)) << n;
    }
  }
}

// An element outside of a table is NaN, one of integers makes the score NaN that is not -inf, and
// nothing outside is read; indices below 0 count from the end.
TEST_P(ScoreProgramTest, OutsideOfTables) {
  const double reals[] = {10, 11, 12, 13, 14};
  const int32_t integers[] = {20, 21, 22, 23, 24};
  for (bool is_real : {true, false}) {
    OneKey problem(std::vector<double>(20));
    problem.function.tables = reals, problem.function.indices = integers;
    const std::string text = is_real ? "@float 0 5\nquery\nint 10\nsub 0 1\nload 0 2\n"
                                     : "@int 0 5\nquery\nint 10\nsub 0 1\nload 0 2\nto_float 3\n";
    const std::vector<double> y = problem.run(ScoreProgram(text));
    for (int n = 0; n < 20; ++n) {
      const int index = n - 10, at = index < 0 ? index + 5 : index;
      if (at < 0 || at >= 5)
        EXPECT_TRUE(std::isnan(y[size_t(n)])) << n;
      else
        EXPECT_NEAR(y[size_t(n)], at + (is_real ? 10 : 20), 1e-13) << n;
    }
  }
}

TEST(ScoreProgramText, SaysWhatIsWrong) {
  const auto expect = [](const std::string& text, const std::string& why) {
    try {
      ScoreProgram program(text);
      ADD_FAILURE() << text;
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  expect("", "an instruction at least");
  expect("score\nerf 0\n", "line 2 ('erf 0'): there is no instruction 'erf'");
  expect("score\nadd 0\n", "'add' takes 2 operands, not 1");
  expect("score\nadd 0 1\n", "operand 1 is no instruction before this one");
  expect("score\nquery\nadd 0 1\n", "does not take operands of these types");
  expect("query\n", "must give a real number");
  expect("score\nfloat x\n", "'x' is no number");
  expect("score\nfloat 1e400\n", "'1e400' is no number");
  expect("score\nint 1.5\n", "'1.5' is no integer");
  expect("score\nint 2147483648\n", "'2147483648' is no integer of 32 bits");
  expect("score\n@float 0 3\n", "tables come before all instructions");
  expect("@float 0 3\nscore\nload 1 0\n", "there is no table 1");
  expect("@float 0 3\nint 3\nload 0 0\n", "index 3 is outside of dimension 0 of size 3");
  expect("@float 0 3 4\nint 1\nload 0 0\n", "'load' takes 3 operands, not 2");
  expect("score\nwhere 0 0 0\n", "'where' takes a boolean");
}

}  // namespace
}  // namespace qkv::test
