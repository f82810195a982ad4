// Private operators: what this machine can do at best, for `python -m qkv.bench`.
#include "probe.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace {

double probe_fma_gflops(std::string isa, c10::ScalarType dtype, int64_t threads) {
  TORCH_CHECK(dtype == c10::kFloat || dtype == c10::kDouble,
              "dtype: expected float32 or float64, got ", dtype);
  const auto kind = dtype == c10::kFloat ? qkv::DType::f32 : qkv::DType::f64;
  return qkv::probe_fma_gflops(isa.c_str(), kind, static_cast<int>(threads));
}

double probe_read_bandwidth(int64_t threads) {
  return qkv::probe_read_bandwidth_gbs(static_cast<int>(threads), qkv::uncached_bytes());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qkv, m) {
  m.def("_probe_fma_gflops(str isa, ScalarType dtype, int threads) -> float", probe_fma_gflops);
  m.def("_probe_read_bandwidth(int threads) -> float", probe_read_bandwidth);
}
