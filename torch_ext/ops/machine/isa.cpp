// The version, the instruction set in use, and how it multiplies half precision: no tensors, so any
// backend.
#include <torch/library.h>

#include <string>
#include <vector>

#include "compat/torch_versions.h"
#include "dispatch/dispatch.h"

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

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  // Behind qkv.active_isa(), qkv.supported_isas() and qkv.set_isa().
  m.def("_version() -> str", &version);
  m.def("_active_isa() -> str", &active);
  m.def("_supported_isas() -> str[]", &supported);
  m.def("_set_isa(str name) -> ()", &set);
  // Behind qkv.half_products() and qkv.set_half_products().
  m.def("_half_products() -> str", &products);
  m.def("_set_half_products(str name) -> ()", &set_products);
}

}  // namespace qkv
