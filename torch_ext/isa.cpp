// The version, the instruction set in use, and how it multiplies half precision: no tensors, so any
// backend.
#include <torch/library.h>

#include <string>
#include <vector>

#include "attention.h"
#include "torch_versions.h"

namespace qkv {
namespace {

std::string active() {
  return with_value_error([] { return std::string(active_isa()); });
}

std::vector<std::string> supported() {
  const auto names = supported_isas();
  return {names.begin(), names.end()};
}

void set(std::string name) {
  with_value_error([&] { set_isa(name.c_str()); });
}

std::string products() {
  return with_value_error([] { return std::string(half_products()); });
}

void set_products(std::string name) {
  with_value_error([&] { set_half_products(name.c_str()); });
}

std::string version() { return QKV_VERSION; }

}  // namespace

TORCH_LIBRARY_IMPL(qkv, CompositeExplicitAutograd, m) {
  m.impl("_version", &version);
  m.impl("_active_isa", &active);
  m.impl("_supported_isas", &supported);
  m.impl("_set_isa", &set);
  m.impl("_half_products", &products);
  m.impl("_set_half_products", &set_products);
}

}  // namespace qkv
