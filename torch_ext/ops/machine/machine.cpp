// The version, the instruction set in use, how it multiplies half precision, and what this machine
// can do at best: private operators without tensors, so for any backend.
#include <c10/core/ScalarType.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "call/dtypes.h"
#include "compat/torch_versions.h"
#include "dispatch/dispatch.h"
#include "probe/probe.h"
#include "qkv/reproducible.h"

namespace qkv {
namespace {

std::vector<std::string> supported() {
  const auto names = supported_isas();
  return {names.begin(), names.end()};
}

// A setting, which the environment may have wrong.
template <const char* (*name)()>
std::string name_of() {
  return with_value_error([] { return std::string(name()); });
}

template <void (*set)(const char*)>
void set_to(std::string name) {
  with_value_error([&] { set(name.c_str()); });
}

std::tuple<std::string, double> peak(std::string isa, c10::ScalarType dtype, int64_t threads) {
  const auto known = dtype_of(dtype);
  TORCH_CHECK(known, "dtype: expected float32, float64, bfloat16 or float16, got ", dtype);
  const auto found =
      with_value_error([&] { return probe_peak(isa.c_str(), *known, int(threads)); });
  return {found.instruction, found.gflops};
}

double read_bandwidth(int64_t threads) {
  return with_value_error([&] { return probe_read_bandwidth_gbs(int(threads), uncached_bytes()); });
}

}  // namespace

ReproducibleGuard::ReproducibleGuard(bool yes) : before_(reproducible()) { set_reproducible(yes); }
ReproducibleGuard::~ReproducibleGuard() { set_reproducible(before_); }

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_version() -> str", [] { return std::string(QKV_VERSION); });
  // Behind qkv.active_isa(), qkv.supported_isas() and qkv.set_isa().
  m.def("_active_isa() -> str", &name_of<active_isa>);
  m.def("_supported_isas() -> str[]", &supported);
  m.def("_set_isa(str name) -> ()", &set_to<set_isa>);
  // Behind qkv.half_products() and qkv.set_half_products().
  m.def("_half_products() -> str", &name_of<half_products>);
  m.def("_set_half_products(str name) -> ()", &set_to<set_half_products>);
  // Behind qkv.is_reproducible() and qkv.set_reproducible().
  m.def("_reproducible() -> bool", [] { return with_value_error([] { return reproducible(); }); });
  m.def("_set_reproducible(bool yes) -> ()", &set_reproducible);
  // For `python -m qkv.bench`.
  m.def("_probe_peak(str isa, ScalarType dtype, int threads) -> (str instruction, float gflops)",
        &peak);
  m.def("_probe_read_bandwidth(int threads) -> float", &read_bandwidth);
  m.def("_probe_uncached_bytes() -> int", [] { return static_cast<int64_t>(uncached_bytes()); });
}

}  // namespace qkv
