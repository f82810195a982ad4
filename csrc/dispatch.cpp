// Which implementation runs: the only place that asks the CPU what it can do.
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "isa/implementation.h"

namespace qkv {
namespace {

// Best first; amx behind what every CPU that has it has too, until it has been measured on one.
const Implementation* const kImplementations[] = {
#if defined(__x86_64__)
    &kAvx512Bf16, &kAmx, &kAvx512, &kAvx2,
#elif defined(__aarch64__)
    &kNeon,
#endif
    &kGeneric,
};

std::string names_of_supported() {
  std::string names;
  for (const char* name : supported_isas())
    names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

std::vector<const Implementation*>& added() {
  static std::vector<const Implementation*> implementations;
  return implementations;
}

const Implementation& find(const std::string& name, const char* asked_by) {
  for (const Implementation* implementation : added())
    if (name == implementation->name) return *implementation;
  for (const Implementation* implementation : kImplementations) {
    if (name != implementation->name) continue;
    if (implementation->supported()) return *implementation;
    throw std::invalid_argument(std::string(asked_by) + ": this CPU cannot run '" + name +
                                "', it can run: " + names_of_supported());
  }
  throw std::invalid_argument(std::string(asked_by) + ": no instruction set is called '" + name +
                              "', expected one of: " + names_of_supported());
}

std::atomic<const Implementation*> active{nullptr};

}  // namespace

void add_implementation(const Implementation& implementation) {
  added().push_back(&implementation);
}

std::vector<const char*> supported_isas() {
  std::vector<const char*> names;
  for (const Implementation* implementation : kImplementations)
    if (implementation->supported()) names.push_back(implementation->name);
  return names;
}

const Implementation& active_implementation() {
  const Implementation* implementation = active.load(std::memory_order_acquire);
  if (!implementation) {
    const char* forced = std::getenv("QKV_ISA");
    implementation = &find(forced && *forced ? forced : supported_isas().front(), "QKV_ISA");
    active.store(implementation, std::memory_order_release);
  }
  return *implementation;
}

const char* active_isa() { return active_implementation().name; }

void set_isa(const char* name) { active.store(&find(name, "set_isa"), std::memory_order_release); }

}  // namespace qkv
