// qkv/score_expression.h: functions built by expressions, against the formula.
#include <clocale>
#include <cstdlib>
#include <filesystem>
#include <locale>

#include "common.h"
#include "qkv/score_expression.h"

namespace qkv::test::score_expression_tests {
namespace {

using namespace qkv::scores;

struct Tensors {
  at::Tensor query = randn({2, 3, 5, 8}), key = randn({2, 3, 7, 8}), value = randn({2, 3, 7, 4});
  at::Tensor i = at::arange(5, at::kLong).unsqueeze(1), j = at::arange(7, at::kLong);
  at::Tensor scores = at::matmul(query, key.transpose(-2, -1)) / std::sqrt(8.0);

  at::Tensor attend(const Expression& function) const {
    return attention(query, key, value, function.in(AttentionOptions(), at::kDouble));
  }
  void expect(const Expression& function, const at::Tensor& changed) const {
    const at::Tensor expected = at::matmul(at::softmax(changed, -1), value);
    EXPECT_TRUE(at::allclose(attend(function), expected, 1e-10, 1e-12));
  }
};

TEST(ScoreExpression, DoesWhatTheFormulaSays) {
  const Tensors t;
  const at::Tensor slopes = randn({3}).requires_grad_(), distance = (t.i - t.j).abs();
  const at::Tensor expected = t.scores - slopes.view({3, 1, 1}) * distance;
  const Expression alibi = score() - Table(slopes)[head()] * abs(qkv::scores::query() - key());
  t.expect(alibi, expected);
  const auto gradient = [&](const at::Tensor& output) {
    return torch::autograd::grad({output.sin().sum()}, {slopes})[0];
  };
  EXPECT_TRUE(at::allclose(gradient(t.attend(alibi)),
                           gradient(at::matmul(at::softmax(expected, -1), t.value))));
}

TEST(ScoreExpression, ConvertsNumbers) {
  const Tensors t;
  t.expect(2 * tanh(score() / 2) + 1, 2 * (t.scores / 2).tanh() + 1);
  t.expect(score() + (qkv::scores::query() - key()) / 4, t.scores + (t.i - t.j) / 4.0);
  t.expect(
      where((rem(floordiv(key(), 2), 3) == 0) | !(key() < 6), score(), -1),
      at::where((t.j.floor_divide(2).remainder(3).eq(0)).logical_or(t.j.ge(6)), t.scores, -1.));
}

TEST(ScoreExpression, ReadsTablesOfBothKinds) {
  const Tensors t;
  const at::Tensor kinds = at::tensor({0, 1, 1, 0, 2, 2, 1}), table = randn({3, 3});
  const Table kind(kinds), of(table);
  t.expect(score() + of(kind[key()], rem(qkv::scores::query(), 3)),
           t.scores + table.index({kinds.unsqueeze(0), t.i.remainder(3)}));
}

TEST(ScoreExpression, HasAPointInNumbersInEveryLocale) {
  char folder[] = "/tmp/qkv_locale_XXXXXX";
  ASSERT_TRUE(mkdtemp(folder));
  const std::string german = std::string(folder) + "/de_DE";
  std::system(("localedef -i de_DE -f ISO-8859-1 " + german + " >" + german + ".log 2>&1").c_str());
  setenv("LOCPATH", folder, 1);
  const bool has_comma = setlocale(LC_NUMERIC, "de_DE");
  const Tensors t;
  t.expect(score() * 2.5, t.scores * 2.5);
  setlocale(LC_NUMERIC, "C");
  unsetenv("LOCPATH");
  std::filesystem::remove_all(folder);
  if (!has_comma) GTEST_SKIP() << "there is no localedef, or no de_DE to make a locale of";
}

struct Grouping : std::numpunct<char> {
  char do_thousands_sep() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(ScoreExpression, HasNoCommaInNumbersInAnyLocale) {
  const Tensors t;
  const at::Tensor table = randn({2048});
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouping));
  t.expect(score() + Table(table)[key() + 1024], t.scores + table.slice(0, 1024, 1031));
  std::locale::global(before);
}

template <class Make>
void expect_error(const Make& make, const std::string& what) {
  try {
    make();
    ADD_FAILURE() << what;
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
  }
}

TEST(ScoreExpression, SaysWhatIsWrong) {
  expect_error([] { Table(randn({3}))(head(), key()); }, "2 indices are given");
  expect_error([] { Table(randn({3}))[score()]; }, "an index of a table is real");
  expect_error([] { head().in(AttentionOptions()); }, "gives an integer");
  expect_error([] { where(head(), 1, 2); }, "the first operand is an integer");
  expect_error([] { (head() < 2) + 1; }, "add: an operand is a boolean");
  expect_error([] { operation("add", {}); }, "add takes 2 operands, not 0");
  expect_error([] { operation("where", {score() > 0}); }, "where takes 3 operands, not 1");
  expect_error([] { operation("query", {}); }, "there is no operation 'query'");
  Expression deep = score();
  expect_error(
      [&] {
        while (true) deep = deep + 1;
      },
      "more than 4096 operations");
  const int64_t large = int64_t(1) << 31;
  const Table table(at::full({2}, large));
  expect_error([&] { (score() + table[head()]).in(AttentionOptions()); }, "int32 does not have");
  expect_error([&] { Tensors().attend(score() + large); }, "no integer of 32 bits");
}

}  // namespace
}  // namespace qkv::test::score_expression_tests
