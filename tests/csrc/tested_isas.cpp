// Says at the end on which instruction sets tests ran, and how many on each.
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <string>

namespace qkv::test {
namespace {

class TestedIsas : public ::testing::EmptyTestEventListener {
  void OnTestEnd(const ::testing::TestInfo& info) override {
    // The names of tests of QKV_FOR_EACH_ISA are Isa/Suite.Name/isa.
    const std::string suite = info.test_suite_name(), name = info.name();
    if (suite.rfind("Isa/", 0) == 0 && !info.result()->Skipped())
      ++tests_[name.substr(name.rfind('/') + 1)];
  }
  void OnTestProgramEnd(const ::testing::UnitTest&) override {
    if (tests_.empty()) return;
    std::cout << "[   ISA    ]";
    const char* comma = " ";
    for (const auto& [isa, count] : tests_) {
      std::cout << comma << isa << ": " << count << " tests";
      comma = ", ";
    }
    std::cout << std::endl;
  }

  std::map<std::string, int> tests_;
};

const bool kRegistered = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new TestedIsas);
  return true;
}();

}  // namespace
}  // namespace qkv::test
