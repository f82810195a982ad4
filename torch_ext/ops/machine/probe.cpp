// Private operators: what this machine can do at best, for `python -m qkv.bench`.
#include "probe/probe.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "call/dtypes.h"
#include "compat/torch_versions.h"

namespace {

std::tuple<std::string, double> probe_peak(std::string isa, c10::ScalarType dtype,
                                           int64_t threads) {
  const auto known = qkv::dtype_of(dtype);
  TORCH_CHECK(known, "dtype: expected float32, float64, bfloat16 or float16, got ", dtype);
  const auto found = qkv::with_value_error(
      [&] { return qkv::probe_peak(isa.c_str(), *known, static_cast<int>(threads)); });
  return {found.instruction, found.gflops};
}

double probe_read_bandwidth(int64_t threads) {
  return qkv::with_value_error([&] {
    return qkv::probe_read_bandwidth_gbs(static_cast<int>(threads), qkv::uncached_bytes());
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_probe_peak(str isa, ScalarType dtype, int threads) -> (str instruction, float gflops)",
        probe_peak);
  m.def("_probe_read_bandwidth(int threads) -> float", probe_read_bandwidth);
  m.def("_probe_uncached_bytes() -> int",
        [] { return static_cast<int64_t>(qkv::uncached_bytes()); });
}
