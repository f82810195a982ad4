// Runs Workloads: run() computes, truth() says what should come out,
// expect_close() compares.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention.h"
#include "dispatch/dispatch.h"
#include "emulated/twins.h"
#include "workload.h"

namespace qkv::test {

// The entry points of the library, or those of the reference.
struct Library {
  void (*forward)(const Problem&, const ForwardResult&);
  void (*backward)(const Problem&, const BackwardArgs&);
  void (*hard)(const Problem&, const HardResult&);
};
extern const Library kKernels, kReference;

// Every element of every result, row-major. A vector is empty where the result was not wanted.
struct Results {
  std::vector<double> output, lse;
  std::vector<double> grad_query, grad_key, grad_value;
  std::vector<double> grad_mask, grad_mask_keys, grad_mask_queries, grad_alibi_slopes, grad_sinks;
  std::vector<double> grad_bias, grad_bias_keys, grad_bias_queries;
  std::vector<double> weights;
  std::vector<double> hard_output, hard_index;
};

struct NamedResult {
  const char* name;
  std::vector<double> Results::* values;
  bool in_dtype = false;  // in the Problem's dtype; else in its compute type, in f64 or in int64
};
constexpr NamedResult kResults[] = {{"output", &Results::output, true},
                                    {"lse", &Results::lse},
                                    {"grad_query", &Results::grad_query, true},
                                    {"grad_key", &Results::grad_key, true},
                                    {"grad_value", &Results::grad_value, true},
                                    {"grad_mask", &Results::grad_mask},
                                    {"grad_mask_keys", &Results::grad_mask_keys},
                                    {"grad_mask_queries", &Results::grad_mask_queries},
                                    {"grad_bias", &Results::grad_bias},
                                    {"grad_bias_keys", &Results::grad_bias_keys},
                                    {"grad_bias_queries", &Results::grad_bias_queries},
                                    {"grad_alibi_slopes", &Results::grad_alibi_slopes},
                                    {"grad_sinks", &Results::grad_sinks},
                                    {"weights", &Results::weights},
                                    {"hard_output", &Results::hard_output, true},
                                    {"hard_index", &Results::hard_index}};

// Memory for the results of a Workload, which must outlive it.
class Outputs {
 public:
  explicit Outputs(const Workload& w);

  // The arguments of forward and backward, called in this order: the second call reads what the
  // first has written.
  ForwardResult forward_result(bool want_lse) const;
  BackwardArgs backward_args() const;

  // Replaces the output of the forward pass, row-major, before the backward pass reads it.
  void set_output(const std::vector<double>& values);
  // Makes the results of the forward pass read-only.
  void forward_is_done() const;
  // Fails the test if anything but elements was written.
  void expect_nothing_else_written() const;
  Results values() const;

 private:
  std::vector<const Tensor*> all() const;

  const Workload& w_;
  Tensor output_, lse_;
  Tensor grad_query_, grad_key_, grad_value_;
  Tensor grad_mask_, grad_mask_keys_, grad_mask_queries_, grad_alibi_slopes_, grad_sinks_;
  Tensor grad_bias_, grad_bias_keys_, grad_bias_queries_;
  Tensor weights_;
};

// run_forward() runs the forward pass alone, run() both passes. The inputs are read-only meanwhile,
// and the test fails if anything but the outputs' own elements is written.
Results run_forward(const Workload& w, const Library& library = kKernels);
// With the log-sum-exp, of another problem with the sizes and outputs of the workload.
Results run_forward(const Workload& w, const Problem& problem);
Results run(const Workload& w, const Library& library = kKernels);
// Runs attention_hard, which gives hard_output and hard_index.
Results run_hard(const Workload& w, const Library& library = kKernels);

// The results that run_forward() and run() should give: those of the reference, all in f64. The
// backward pass of half precision is a function of the rounded output, so the reference is given
// the output of `actual`, unless slopes have a gradient (common/row_sums.h).
Results forward_truth(const Workload& w);
Results truth(const Workload& w, const Results& actual);

void expect_close(const Results& actual, const Results& expected, const Case& c);
// Expect that run() is close to truth(), and run_forward() to forward_truth(). They return what was
// run.
Results expect_truth(const Workload& w);
Results expect_forward_truth(const Workload& w);
void expect_same_bits(const std::vector<double>& actual, const std::vector<double>& expected);
void expect_identical(const Results& actual, const Results& expected);
// The root mean square of the difference, divided by that of `expected`.
double relative_rms_error(const std::vector<double>& actual, const std::vector<double>& expected);
// The largest relative_rms_error() of numbers that were rounded once, to half precision.
double rms_of_rounding(DType half);

// The instruction sets that tests run on: the supported ones, and the twins of emulated/ that this
// program has.
inline std::vector<const char*> tested_isas() {
  std::vector<const char*> isas = supported_isas();
  isas.insert(isas.end(), twins().begin(), twins().end());
  return isas;
}

// Whether the products of an instruction set take both factors in bf16, in pairs.
inline bool multiplies_pairs(const std::string& isa) {
  return isa.find("bf16") != isa.npos || isa.find("amx") != isa.npos;
}

// A test that runs on each of tested_isas().
class IsaTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { set_isa(GetParam()); }
  void TearDown() override { set_isa(supported_isas().front()); }

  // The numbers [begin, end) of a test's cases: `all` of them, or in the quick layer `quick` others
  // on each instruction set. They may be larger than `all`: who counts ways takes them modulo.
  struct Seeds {
    int begin, end;
  };
  Seeds seeds(int quick, int all) const {
    if (!kQuick) return {0, all};
    const int begin = quick * place();
    return {begin, begin + quick};
  }
  // Whether case `number` of a test is run: in the quick layer one in so many, others on each
  // instruction set.
  bool takes(int number, int one_in) const { return !kQuick || (number + place()) % one_in == 0; }

 private:
  // Of the instruction set among those that are tested.
  int place() const {
    const std::vector<const char*> isas = tested_isas();
    return int(std::find(isas.begin(), isas.end(), std::string(GetParam())) - isas.begin());
  }
};

#define QKV_FOR_EACH_ISA(suite)                                            \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(tested_isas()), \
                           [](const auto& info) { return std::string(info.param); })

}  // namespace qkv::test
